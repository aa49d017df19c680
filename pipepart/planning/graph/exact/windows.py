"""What the devices can hold at a bottleneck: which sets can be what is done before a border between two stages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..device_states import Walk
from ..problem import Floats, Problem

# Loads are sums in some order of rounding: what exceeds a limit by less than this fraction of it is no excess.
SLACK = 1e-12


class Windows:
    """Room for work before and behind a border, for each way to share out the devices, at one bottleneck.

    Work is counted as ``Problem.work`` does; a device has room for the bottleneck times what its seconds are worth.
    Where no device before the border is free of
    charge for tensors, the last of them pays for what crosses it; the same holds behind.

    Attributes:
        seconds: the bottleneck.
        mass: work of the first ``i`` nodes, at ``i``.
        charge: room that one second of a tensor that crosses the border takes, at the least.
        reach: for each type, the work that one device can take.
        room: for each state of the walk, the work that the free devices can take.
        pays: for each state, whether any free device must pay for tensors.
        devices: how many there are.
        longest: the work that any one device can take.
        free: the work that a device can take that does not pay for tensors; 0 if there is none.
    """

    def __init__(self, problem: Problem, walk: Walk, seconds: float) -> None:
        self.seconds = seconds
        self.mass: Floats = np.concatenate([np.zeros(1), np.cumsum(problem.work)])
        rooms = seconds * problem.worth
        # Seconds of a tensor take less of that room where the device that pays for it is a slow one.
        self.charge = min(
            (float(w) for w, kind in zip(problem.worth, problem.types, strict=True) if kind.pays), default=1.0
        )
        self.reach = rooms
        pays = np.array([kind.pays for kind in problem.types])
        self.room: Floats = np.asarray(walk.free @ rooms, dtype=np.float64)
        self.pays: NDArray[np.bool_] = walk.free @ ~pays == 0
        self.devices = int(walk.free[0].sum())
        self.longest = float(rooms.max())
        self.free = float(rooms[~pays].max(initial=0.0))
        used = walk.free[0] - walk.free
        before, behind = used @ rooms, self.room
        self._classes: list[tuple[bool, bool, Floats, Floats]] = []
        for left in (True, False):
            for right in (True, False):
                states = np.nonzero(((used @ ~pays == 0) == left) & (self.pays == right))[0]
                order = states[np.argsort(before[states], kind="stable")]
                if len(order):
                    self._classes.append((left, right, before[order], behind[order]))
        self._slack = SLACK * float(self.room[0])
        firsts = np.array([net.pins[0] for net in problem.nets], dtype=np.int64)
        lasts = np.array([net.pins[-1] for net in problem.nets], dtype=np.int64)
        costs = np.array([net.seconds for net in problem.nets])
        self._nets = firsts, lasts, costs

    def allow(self, inside: Floats, outside: Floats, crossing: Floats) -> NDArray[np.bool_]:
        """Whether sets may be a border: least work inside and outside, and the least cost of what crosses it."""
        result = np.zeros(len(inside), dtype=bool)
        for left, right, before, behind in self._classes:
            need = inside + self.charge * crossing if left else inside
            rest = outside + self.charge * crossing if right else outside
            # The rooms before and behind add up to one number: the least sufficient one before leaves most behind.
            place = np.searchsorted(before, need - self._slack)
            result |= (place < len(before)) & (
                behind[np.minimum(place, len(before) - 1)] >= rest - self._slack
            )
        return result

    def spanning(self, low: int, high: int) -> float:
        """Seconds of the tensors that have pins before node ``low`` and from node ``high`` on."""
        firsts, lasts, costs = self._nets
        return float(costs[(firsts < low) & (lasts >= high)].sum())
