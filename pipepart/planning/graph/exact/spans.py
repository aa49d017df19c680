"""How long a stage can be and still have a tensor that is cut at both of its borders."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..problem import Floats, Ints, Problem
from .windows import Windows

# Of the work of all nodes: tensors that span more are told apart, so that the others give a useful limit.
LOCAL = 1 / 8

# With more tensors than that beyond the limit, there is none.
MOST_FAR = 128


class Spans:
    """The work of the longest stage that a tensor can pass over.

    Where a tensor is cut at both borders of a stage, some pin ``u`` is before it and some pin ``w`` behind it. Then no
    ancestor of ``u`` is in the stage, and no descendant of ``w``: their work and that of the stage come to no more
    than that of all nodes. Stages of more work pay for each tensor that either border cuts.

    Attributes:
        limit: work of a stage above which no tensor is cut at both borders, but for those in ``far``; infinite where
            too many would have to be left out.
        far: the tensors that may be cut at both borders of longer stages.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        work = problem.work
        total = float(work.sum())
        reach = self.reach
        ahead, behind = self.ahead, self.behind = reach.T @ work, reach @ work
        spans = np.zeros(len(problem.nets))
        for number, net in enumerate(problem.nets):
            pins = np.array(net.pins)
            rooted = bool(reach[pins[0], pins].all())
            spans[number] = total - ahead[pins].min() - behind[pins[1:] if rooted else pins].min()
        allowed = LOCAL * total
        self.far: Ints = np.nonzero(spans > allowed)[0]
        self.limit = float(np.max(spans[spans <= allowed], initial=0.0)) * (1 + 1e-9) + 1e-12 * total
        if len(self.far) > MOST_FAR:
            self.far, self.limit = np.zeros(0, dtype=np.int64), np.inf

    def between(self, root: int, use: int) -> float:
        """Work of the longest stage that a tensor from one node to another can pass over."""
        return float(self._problem.work.sum() - self.ahead[root] - self.behind[use])

    @cached_property
    def reach(self) -> NDArray[np.bool_]:
        """Whether each node is the same as, or an ancestor of, each other one; shape (nodes, nodes)."""
        count = len(self._problem)
        found = np.zeros((count, count), dtype=bool)
        for node in range(count - 1, -1, -1):
            found[node, node] = True
            for after in self._problem.successors[node]:
                found[node] |= found[after]
        return found


def levels(work: Floats, near: Floats, limit: float, windows: Windows) -> tuple[Ints, Ints]:
    """The least number of devices that each of some sets can be a border behind and before.

    With ``x`` the work of a border and ``p`` what crosses it, a stage above ``limit`` from ``(x, p)`` to ``(x', p')``
    takes at least ``x' - x + p + p'``, so ``x' + p'`` is at most one device's room more than the largest ``x - p``
    that one device fewer reaches; any other stage adds at most ``limit``. What cannot reach both ends with all devices
    is left out of these maxima, until nothing changes.

    Args:
        work: of each set; the first one is empty and the last one is everything.
        near: seconds of the tensors that cross it, of those that no stage above ``limit`` passes over.
        limit: work of a stage that a tensor may pass over.
        windows: what the devices can take.
    """
    room, devices = windows.longest, windows.devices
    step = max(min(limit, room), windows.free)
    toll = windows.charge * near
    ahead, behind = np.zeros((2, len(work)), dtype=np.int64)
    kept = -1
    while True:
        ahead = _climbed(work, toll, 0, step, room, devices - behind)
        behind = _climbed(work[-1] - work, toll, len(work) - 1, step, room, devices - ahead)
        now = int(np.count_nonzero(ahead + behind <= devices))
        if now == kept:
            return ahead, behind
        kept = now


def _climbed(work: Floats, toll: Floats, start: int, step: float, room: float, most: Ints) -> Ints:
    """The least number of devices from set ``start`` to each; sets that need more than ``most`` lead no further."""
    slack = 1e-11 * float(work.max())
    full, net = work + toll, work - toll
    found = np.full(len(work), np.iinfo(np.int32).max, dtype=np.int64)
    found[start] = 0
    best, farthest = 0.0, 0.0
    for used in range(1, int(most.max()) + 1):
        new = found > used
        new &= (full <= room + best + slack) | (work <= farthest + step + slack)
        if not new.any():
            break
        found[new] = used
        live = new & (most >= used)
        best = max(best, float(net[live].max(initial=0.0)))
        farthest = max(farthest, float(work[live].max(initial=0.0)))
    return found
