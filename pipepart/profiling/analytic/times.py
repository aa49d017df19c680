"""Estimates the seconds of each layer from a roofline, without running a kernel.

::

    layers on the meta device ──▶ a pass: torch's operations of each layer ──▶ flops, bytes ──Roofline──▶ seconds
                                  forward │ backward for inputs │ for weights
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ...autograd import graph_cut
from ...autograd.dispatch_mode import DispatchMode
from ...autograd.split_backward import WeightGradients
from ..costs import Timing
from ..layer_pass import LayerPass, Observer
from ..timing import LayerTimes
from .roofline import Roofline
from .work import Work, work_of

_PARTS = ("forward", "backward_input", "backward_weight")
WorkTable = dict[tuple[str, int], list[Work]]  # key: part, index of the layer (of the loss: number of layers)


class WorkOfLayers(DispatchMode, Observer):
    """Lists the operations of each part of each layer while a pass with a split backward runs.

    Attributes:
        work: the operations of each part of each layer, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work: WorkTable = defaultdict(list)
        self._into: list[Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        work = work_of(func, args, kwargs, result)
        if work is not None:
            self._into.append(work)
        return result

    def forward_starts(self, index: int, value: Any) -> None:
        self._into = self.work["forward", index]

    def forward_ends(self, index: int, output: Any) -> None:
        self._into = []  # discards operations of the pass between layers

    def backward_starts(self, index: int, gradients: graph_cut.Gradients) -> None:
        self._into = self.work["backward_input", index]

    def input_gradients_done(self, index: int, deferred: WeightGradients | None) -> None:
        self._into = self.work["backward_weight", index]

    def backward_ends(self, index: int) -> None:
        self._into = []


def work_of_step(chain: LayerPass, micro_batch: Any) -> tuple[WorkTable, WorkTable]:
    """Return the work of the first micro-batch of a step, without gradients to add to, and of a later micro-batch."""
    chain.zero_grad()
    first, later = WorkOfLayers(), WorkOfLayers()
    for work in (first, later):
        with work:
            chain.run(micro_batch, work, split=True)
    return first.work, later.work


def estimate_times(
    chain: LayerPass, micro_batch: Any, micro_batches: int, roofline: Roofline
) -> list[LayerTimes]:
    """Estimate the times of each layer of a chain on the meta device, then of its loss if there is one.

    Args:
        chain: the layers with their loss.
        micro_batch: the input of the first layer.
        micro_batches: number of micro-batches of a step. The time of a backward is the mean over them.
        roofline: the speed of the device.
    """
    first, later = work_of_step(chain, micro_batch)

    def timing(part: str, index: int) -> Timing:
        first_seconds, later_seconds = (roofline.seconds(work[part, index]) for work in (first, later))
        return Timing(seconds=(first_seconds + (micro_batches - 1) * later_seconds) / micro_batches)

    return [
        LayerTimes(*(timing(part, index) for part in _PARTS), split_seconds=0.0)
        for index in range(len(chain.calls))
    ]
