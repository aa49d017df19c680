"""Capacity: how much work the devices can do within a bottleneck, and which borders that leaves possible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..problem import Floats, Problem

# Tolerance for rounding: a load within this fraction above a limit still meets it.
SLACK = 1e-12


class Capacity:
    """For a bottleneck of T seconds a device does at most T x its weight of work (see ``Problem.device_weights``).

    A border splits the devices into those before it and those after it. It is possible only if, for some split, the
    work before it fits the capacity of the first and the work after it fits that of the others. If no
    device on a side is exempt from transfers (``DeviceType.pays``), that side also pays for what crosses the border.

    Attributes:
        seconds: the bottleneck T.
        prefix_work: work of the first ``i`` nodes, at ``i``.
        transfer_weight: least capacity that one second of transfer uses up.
        device_capacity: of one device of each type.
        total: for each device state, the capacity of the devices that are still available.
        pays: for each device state, whether every available device pays for transfers.
        devices: their number.
        free_capacity: of the largest device that does not pay for transfers; 0 if there is none.
    """

    def __init__(self, problem: Problem, seconds: float) -> None:
        available = problem.orders.available
        self.seconds = seconds
        self.prefix_work: Floats = np.concatenate([np.zeros(1), np.cumsum(problem.work)])
        self.device_capacity = each = seconds * problem.device_weights
        pays = np.array([device_type.pays for device_type in problem.types])
        self.transfer_weight = float(problem.device_weights[pays].min(initial=1.0))
        self.total: Floats = np.asarray(available @ each, dtype=np.float64)
        self.pays: NDArray[np.bool_] = available @ ~pays == 0
        self.devices = problem.device_count
        self.free_capacity = float(each[~pays].max(initial=0.0))
        used = available[-1] - available
        before, after = used @ each, self.total
        self._splits: list[tuple[bool, bool, Floats, Floats]] = []
        for left in (True, False):
            for right in (True, False):
                chosen = np.nonzero(((used @ ~pays == 0) == left) & (self.pays == right))[0]
                order = chosen[np.argsort(before[chosen], kind="stable")]
                if len(order):
                    self._splits.append((left, right, before[order], after[order]))
        self._slack = SLACK * float(self.total[-1])

    def allows(self, inside: Floats, outside: Floats, crossing: Floats) -> NDArray[np.bool_]:
        """Return which sets may be borders, from lower bounds of the work inside, outside and crossing."""
        result = np.zeros(len(inside), dtype=bool)
        for left, right, before, after in self._splits:
            need = inside + self.transfer_weight * crossing if left else inside
            rest = outside + self.transfer_weight * crossing if right else outside
            # Capacity before and after add up to a constant, so the least sufficient capacity before leaves the
            # most after.
            place = np.searchsorted(before, need - self._slack)
            result |= (place < len(before)) & (
                after[np.minimum(place, len(before) - 1)] >= rest - self._slack
            )
        return result
