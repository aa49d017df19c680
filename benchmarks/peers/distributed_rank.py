"""One rank of a pipeline on processes: builds its stages and steps them when it is told."""

import copy
import time
import traceback
from collections import OrderedDict
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks import models
from benchmarks.contender import Cut
from benchmarks.peers.pipepart_threads import PipepartThreads
from pipepart import Plan

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True)
class Build:
    """Order to get ready to run a workload under torch.distributed.pipelining; each rank builds its own."""

    workload: str
    cut: Cut
    micro_batches: int
    schedule: str


@dataclass(frozen=True)
class BuildPipepart:
    """Order to get ready to run a workload under a plan of pipepart, given as text."""

    workload: str
    plan: str


@dataclass(frozen=True)
class Step:
    """Order to run one step; the answer is the CPU seconds that the process has used until its end."""


@dataclass(frozen=True)
class Gradients:
    """Order to answer with the gradients of this rank's stage."""


Order = tuple[str, Build | BuildPipepart | Step | Gradients | None]
"""Which pipeline, and what to do with it; None forgets it."""


def serve(rank: int, rendezvous: str, orders: Connection) -> None:
    """Carry out orders until the other end closes; between two orders the process sleeps on the pipe."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    stages: dict[str, _Rank | PipepartThreads] = {}
    while True:
        try:
            key, order = orders.recv()
        except EOFError:
            break
        try:
            orders.send((True, _carry_out(stages, rank, key, order)))
        except Exception:
            orders.send((False, traceback.format_exc()))
    torch.distributed.destroy_process_group()


def _carry_out(
    stages: "dict[str, _Rank | PipepartThreads]",
    rank: int,
    key: str,
    order: Build | BuildPipepart | Step | Gradients | None,
) -> Any:
    match order:
        case BuildPipepart():
            # Its workers are those of the devices of this rank.
            plan = Plan.model_validate_json(order.plan)
            stages[key] = PipepartThreads(key, models.build(order.workload), plan)
        case Build():
            stages[key] = _Rank(rank, order)
        case Step():
            stages[key].step()
            return time.process_time()
        case Gradients():
            return {name: gradient.numpy() for name, gradient in stages[key].gradients().items()}
        case None:
            stages.pop(key).close()


class _Rank:
    """The stage of this rank, with its end of the mini-batch."""

    def __init__(self, rank: int, order: Build) -> None:
        workload = models.build(order.workload)
        layers = ((name, workload.model.get_submodule(name)) for name in order.cut[rank])
        self._module = nn.Sequential(OrderedDict(layers))
        first_input = workload.sample.chunk(order.micro_batches)[0]
        borders = _borders(workload.model, order.cut, first_input)
        # Stating the shapes keeps TDP from running a training-mode forward to learn them.
        stage = PipelineStage(
            self._module,
            rank,
            len(order.cut),
            torch.device("cpu"),
            input_args=borders[rank],
            output_args=borders[rank + 1],
        )
        self._schedule = SCHEDULES[order.schedule](stage, order.micro_batches, loss_fn=workload.loss_fn)
        is_last = rank == len(order.cut) - 1
        self._inputs = (workload.sample,) if rank == 0 else ()
        self._target = workload.target if is_last else None
        self._losses: list[Tensor] | None = [] if is_last else None

    def step(self) -> None:
        self._module.zero_grad(set_to_none=True)
        self._schedule.step(*self._inputs, target=self._target, losses=self._losses, return_outputs=False)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}

    def close(self) -> None:
        """Nothing is open."""


def _borders(model: nn.Module, cut: Cut, micro_batch: Tensor) -> list[Tensor]:
    """The input of each stage and the output of the last, without their contents."""
    model = copy.deepcopy(model).to("meta")
    borders = [micro_batch.to("meta")]
    for names in cut:
        value = borders[-1]
        for name in names:
            value = model.get_submodule(name)(value)
        borders.append(value)
    return borders
