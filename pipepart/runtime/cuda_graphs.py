"""Records what functions launch on a CUDA device as CUDA graphs."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch

from ..planning import Plan
from .replay.randomness import GLOBAL_GENERATOR
from .slots import Work

_ONE_AT_A_TIME = threading.Lock()  # torch has one capture underway in a process, and no more


class CudaRecorder:
    """Records on the stream that the worker of one stage is on, while other workers go on.

    On another stream a backward could not be recorded while a micro-batch is under way that has run layer by layer:
    autograd keeps one node for each weight, which stays on the stream where it was made.

    Attributes:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def memory(self) -> Any:
        """A pool that is shared with no other recordings."""
        return torch.cuda.graph_pool_handle()

    def record(self, work: Work, memory: Any) -> Work:
        """A capture: nothing is done yet.

        Raises:
            Exception: what the function raises, such as that it may not wait for the device now.
        """
        graph = torch.cuda.CUDAGraph()
        raised: list[Exception] = []
        # Up to torch 2.12 a capture anywhere takes the device's generator, and whoever else draws from it fails.
        with _ONE_AT_A_TIME, GLOBAL_GENERATOR, torch.cuda.device(self.device):
            try:
                with self._capture(graph, memory):
                    _do(work, raised)
            except Exception as error:
                with suppress(Exception):  # as where the device itself has failed
                    self._give_up(memory)
                # The end of a capture that has failed fails as well, and says less.
                raise (raised[0] if raised else error) from None
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, memory: Any) -> torch.cuda.graph:
        # Thread-local, as the threads of other workers may allocate meanwhile.
        stream = torch.cuda.current_stream()
        return torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local")

    def _give_up(self, memory: Any) -> None:
        """Ends a capture whose end has failed: torch's allocator and generator take it to be still underway."""
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, memory)
        except RuntimeError:  # it has ended as it should
            return
        torch._C._cuda_releasePool(self.device.index, memory)
        # The next capture that succeeds gives the generator back.
        with self._capture(torch.cuda.CUDAGraph(), self.memory()):
            torch.zeros((), device=self.device)


def _do(work: Work, raised: list[Exception]) -> None:
    try:
        work()
    except Exception as error:
        raised.append(error)
        raise


def check_cuda_graphs(plan: Plan) -> None:
    """Refuses plans that cannot run by CUDA graphs.

    Raises:
        ValueError: a stage is on no CUDA device or is recomputed, or weights change their place within a step.
    """
    for number, stage in enumerate(plan.all_stages):
        device = plan.cluster.device(stage.device)
        if not (device.torch_device or "").startswith("cuda"):
            raise ValueError(
                f"cuda_graphs=True needs CUDA devices; stage {number} is on {device.name} "
                f"({device.torch_device or 'only described'})"
            )
        if stage.recompute != "never":
            raise ValueError(
                f"cuda_graphs=True keeps what each micro-batch in flight has computed, and the plan has stage {number} "
                "compute it again: plan with recompute='never'"
            )
    if plan.asynchronous:
        raise ValueError(
            f"cuda_graphs=True reads weights where they were when it was recorded, and schedule {plan.schedule!r} has "
            "several versions of them: choose a synchronous schedule, such as '1f1b'"
        )
