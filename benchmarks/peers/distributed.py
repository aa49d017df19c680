"""Pipelines on two gloo processes of one thread each: torch.distributed.pipelining as it is used, and pipepart."""

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.contender import Course
from benchmarks.peers.distributed_rank import Build, BuildPipepart, Gradients, Order, Step, serve
from pipepart import Plan

ANSWER_SECONDS = 300


class Ranks:
    """Two processes that stay up for the whole benchmark and sleep while others run."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        # As under torchrun: a store in a file is looked at every 10 ms, which each call of pipepart would wait for.
        with socket.create_server(("127.0.0.1", 0)) as free:
            rendezvous = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._orders: list[Connection] = []
        self._processes = []
        for rank in range(2):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(rank, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)

    def order(self, order: Order) -> list[Any]:
        """Both ranks do the same thing; their answers, in order of rank."""
        for orders in self._orders:
            orders.send(order)
        # Both answers are taken before either is judged: one left in its pipe would answer the next order.
        answers = [self._answer(rank) for rank in range(2)]
        for rank, (succeeded, answer) in enumerate(answers):
            if not succeeded:
                raise RuntimeError(f"rank {rank} failed:\n{answer}")
        return [answer for _, answer in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._orders[rank].poll(ANSWER_SECONDS):
            raise TimeoutError(f"rank {rank} gave no answer")
        try:
            return self._orders[rank].recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} died") from None

    def close(self) -> None:
        for orders in self._orders:
            orders.close()
        for process in self._processes:
            process.join(timeout=10)
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OnRanks:
    """One pipeline on the two ranks."""

    def __init__(self, name: str, ranks: Ranks, build: Build | BuildPipepart) -> None:
        self.name = name
        self._ranks = ranks
        self._cpu_seconds = 0.0
        ranks.order((name, build))

    @classmethod
    def of_torch(cls, course: Course, ranks: Ranks, schedule: str) -> Self:
        """One schedule of torch.distributed.pipelining."""
        build = Build(course.workload.name, course.cut, course.micro_batches, schedule)
        return cls(f"torch.distributed {schedule}", ranks, build)

    @classmethod
    def of_pipepart(cls, course: Course, ranks: Ranks, name: str, plan: Plan) -> Self:
        """One plan of pipepart, as under torchrun."""
        return cls(f"{name}, 2 ranks", ranks, BuildPipepart(course.workload.name, plan.model_dump_json()))

    def step(self) -> None:
        self._cpu_seconds = sum(self._ranks.order((self.name, Step())))

    def cpu_seconds(self) -> float:
        # The driver's own share, a few pipe messages, is counted with its children's.
        return self._cpu_seconds + time.process_time()

    def gradients(self) -> dict[str, Tensor]:
        answers = self._ranks.order((self.name, Gradients()))
        return {name: torch.from_numpy(gradient) for answer in answers for name, gradient in answer.items()}

    def close(self) -> None:
        self._ranks.order((self.name, None))
