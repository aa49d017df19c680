"""The predicted cost of a plan, and the alternatives to it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ...document import ByteCount, Seconds, Value
from ..costs.layer_ranges import TOLERANCE
from ..costs.stage_memory import RecomputeChoice
from .searched_order import SEARCH


class Prediction(Value):
    """The predicted cost of a plan.

    Attributes:
        step_seconds: forward and backward of one mini-batch, with what the runtime takes to begin and to end a step.
        memory_bytes: [devices of the cluster]: memory peak of each device.
        bubble: idle fraction of the devices within a step.
        bottleneck_seconds: the largest load of a device for one micro-batch: compute, and the transfers over the
            borders of its stages. The partitioner minimises this load. Transfers overlap with compute in
            ``step_seconds``, so a step may be shorter than ``micro_batches * bottleneck_seconds``.
        bottleneck_bound: lower bound of ``bottleneck_seconds`` for cuts of these layers into as many stages that fit
            these devices, in any order of the devices; 0 if unknown, as for an edited cut.
        serial_seconds: all micro-batches of the step, one by one, on a single device like the profiled device.
        found_for: hash of the cluster that the bound holds for: an edit of a device that is not used changes the bound.
    """

    step_seconds: Seconds
    memory_bytes: tuple[ByteCount, ...]
    bubble: float = Field(allow_inf_nan=False)
    bottleneck_seconds: Seconds
    bottleneck_bound: Seconds = 0.0
    serial_seconds: Seconds
    found_for: str = ""

    @property
    def bottleneck_optimal(self) -> bool:
        """True if no cut has a smaller bottleneck. For the step, see :attr:`Plan.step_bound`."""
        return self.bottleneck_seconds <= self.bottleneck_bound * (1 + TOLERANCE)


class Alternative(Value):
    """Another plan that was considered.

    Attributes:
        schedule, micro_batches, chunks, replicas: as in :class:`Plan`.
        stages: number of stages.
        recompute: the modes that stages may use.
        step_seconds: predicted step; None if the plan does not fit, or if its search was stopped because it cannot be
            the fastest.
        memory_bytes: the largest memory peak of a device; None if ``step_seconds`` is None.
        why: why it was not chosen.
    """

    schedule: str
    micro_batches: int = Field(ge=1)
    chunks: int = Field(ge=1)
    replicas: int = Field(default=1, ge=1)
    stages: int = Field(ge=1)
    recompute: RecomputeChoice = "auto"
    step_seconds: Seconds | None = None
    memory_bytes: ByteCount | None = None
    why: str

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords for which :func:`pipepart.plan` returns this plan, besides the keywords of the request."""
        names = ("schedule", "micro_batches", "replicas", "recompute")
        # A searched order may have any number of stages, on any device.
        sized = () if self.schedule == SEARCH else ("stages", "chunks")
        return {name: getattr(self, name) for name in (*names, *sized)}
