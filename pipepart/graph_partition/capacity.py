"""Capacity: the work that devices can do within a given bottleneck, and the borders that it allows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .problem import Floats, Problem

# Relative rounding tolerance: a load at most this fraction above a limit is within the limit.
SLACK = 1e-12


class Capacity:
    """The work that each device can do in T seconds: at most T times its weight (see ``Problem.device_weights``).

    A border splits the devices into a set before it and a set after it. The border is possible only if, for some split,
    the work before it is within the capacity of the first set and the work after it within that of the second. If
    transfers count on all devices (``DeviceType.pays``), they also use up capacity of both sets.

    Attributes:
        seconds: the bottleneck T.
        prefix_work: work of the first ``i`` nodes at index ``i``, [nodes + 1].
        transfer_weight: minimum capacity that one second of transfer uses.
        device_capacity: capacity of one device of each type, [types].
        total: capacity of the available devices in each device state, [states].
    """

    def __init__(self, problem: Problem, seconds: float) -> None:
        available = problem.orders.available
        self.seconds = seconds
        self.prefix_work: Floats = np.concatenate([np.zeros(1), np.cumsum(problem.work)])
        self.device_capacity = each = seconds * problem.device_weights
        all_pay = all(device_type.pays for device_type in problem.types)
        self.transfer_weight = float(problem.device_weights.min()) if all_pay else 0.0
        self.total: Floats = np.asarray(available @ each, dtype=np.float64)
        self._slack = SLACK * float(self.total[-1])
        before = (available[-1] - available) @ each
        order = np.argsort(before, kind="stable")
        self._before, self._after = before[order], self.total[order]

    def allows(self, inside: Floats, outside: Floats, crossing: Floats) -> NDArray[np.bool_]:
        """Return which sets may be borders, [sets].

        Args:
            inside: lower bound on the work of each set, [sets].
            outside: lower bound on the work of all nodes after each border, [sets].
            crossing: lower bound on the seconds of the nets that cross each border, [sets].
        """
        need = inside + self.transfer_weight * crossing
        rest = outside + self.transfer_weight * crossing
        # Capacity before and after add up to a constant, so the smallest sufficient capacity before the border leaves
        # the largest capacity after it.
        place = np.searchsorted(self._before, need - self._slack)
        possible = place < len(self._before)
        return possible & (self._after[np.minimum(place, len(self._before) - 1)] >= rest - self._slack)
