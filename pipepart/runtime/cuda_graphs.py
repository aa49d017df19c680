"""Records what functions launch on a CUDA device as CUDA graphs."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..planning import Plan
from .slots import Work

_ONE_AT_A_TIME = threading.Lock()  # torch has one capture underway in a process, and no more


class CudaRecorder:
    """Records on a stream of its own, while other workers go on. Used by the worker of one stage.

    Attributes:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

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
        with _ONE_AT_A_TIME, torch.cuda.device(self.device):
            self._stream = self._stream or torch.cuda.Stream(self.device)
            # Thread-local, as the threads of other workers may allocate meanwhile.
            capture = torch.cuda.graph(graph, memory, self._stream, capture_error_mode="thread_local")
            current = torch.cuda.current_stream()
            try:
                with capture:
                    _do(work, raised)
            except Exception as error:
                # The end of a capture that has failed fails as well, says less, and leaves its stream the current one.
                torch.cuda.set_stream(current)
                raise (raised[0] if raised else error) from None
        return graph.replay


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
