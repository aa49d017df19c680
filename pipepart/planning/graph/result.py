"""Cut: the stages and devices that :func:`pipepart.planning.cut` returns, and how good they are known to be."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ...cluster import Device


@dataclass(frozen=True)
class Cut:
    """Stages of a graph, each with its device, and how good they are known to be.

    Attributes:
        stages: the nodes of each stage in execution order, stages in pipeline order; none is empty.
        devices: the device of each stage; devices of the cluster that are not worth using are left out.
        loads: seconds of each stage: compute, and the tensors that cross its border.
        lower_bound: seconds; no cut of this graph over this cluster has a smaller bottleneck.
        optimal: whether ``bottleneck`` is proven to be the smallest, to one part in 10⁹.
    """

    stages: tuple[list[Hashable], ...]
    devices: tuple[Device, ...]
    loads: tuple[float, ...]
    lower_bound: float
    optimal: bool

    @property
    def bottleneck(self) -> float:
        """The largest load of any stage, in seconds."""
        return max(self.loads)

    @property
    def gap(self) -> float:
        """How far the bottleneck may be above the smallest one, as a fraction of that: 0.02 for 2 %."""
        if self.optimal:
            return 0.0
        return self.bottleneck / self.lower_bound - 1 if self.lower_bound > 0 else float("inf")
