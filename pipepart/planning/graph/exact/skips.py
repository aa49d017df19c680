"""Skips: bounds the work of a stage that a tensor can skip, and rules out borders with it."""

from __future__ import annotations

import numpy as np

from ..problem import Floats, Ints, Problem
from .capacity import Capacity
from .reachability import Reachability

# Fraction of the work of all nodes. Tensors that can skip a longer stage are listed in ``Skips.far``, so that the
# limit for the others stays useful.
LOCAL = 1 / 8

# With more far tensors than this there is no limit.
MOST_FAR = 128


class Skips:
    """The work of the longest stage that a tensor can pass over.

    Suppose that a tensor is cut at both borders of a stage. Then some pin ``u`` lies before the stage and some pin
    ``w`` after it, so the stage holds no ancestor of ``u`` and no descendant of ``w``. Its work is therefore at most
    that of all nodes less that of these ancestors and descendants. A stage of more work pays for each tensor that
    either of its borders cuts.

    Attributes:
        reachable: which nodes lead to which.
        ancestor_work: of each node: the work of its ancestors and its own.
        descendant_work: of each node: the work of its descendants and its own.
        rooted: of each net: whether its first pin is an ancestor of all others.
        limit: no tensor but those in ``far`` passes over a stage of more work; infinite where too many are far.
        far: the nets that may pass over longer stages.
    """

    def __init__(self, problem: Problem) -> None:
        self._total = float(problem.work.sum())
        self.reachable = Reachability(problem, 0, len(problem))
        self.ancestor_work, self.descendant_work = self.reachable.summed(problem.work)
        self.rooted = np.zeros(len(problem.nets), dtype=bool)
        longest = np.zeros(len(problem.nets))
        for number, net in enumerate(problem.nets):
            pins = np.array(net.pins)
            self.rooted[number] = self.reachable.leads_to(net.pins[0], pins).all()
            last = pins[1:] if self.rooted[number] else pins
            longest[number] = self._total - self.ancestor_work[pins].min() - self.descendant_work[last].min()
        local = longest <= LOCAL * self._total
        self.far: Ints = np.nonzero(~local)[0]
        self.limit = float(np.max(longest[local], initial=0.0)) * (1 + 1e-9) + 1e-12 * self._total
        if len(self.far) > MOST_FAR:
            self.far, self.limit = np.zeros(0, dtype=np.int64), np.inf

    def between(self, root: int, use: int) -> float:
        """Return the work of the longest stage that a tensor from node ``root`` to node ``use`` can skip."""
        return float(self._total - self.ancestor_work[root] - self.descendant_work[use])


def stage_counts(work: Floats, near: Floats, limit: float, capacity: Capacity) -> tuple[Ints, Ints]:
    """Return the least number of stages before each border, and after it.

    Let ``x`` be the work before a border and ``p`` what crosses it. A stage of more work than ``limit`` from
    ``(x, p)`` to ``(x', p')`` takes at least ``x' - x + p + p'``. So ``x' + p'`` is at most the capacity of one device
    more than the largest ``x - p`` of any border with one stage fewer. Any other stage adds at most ``limit``. Borders
    that need more stages in all than there are devices are left out of these maxima, until nothing changes.

    Args:
        work: of the nodes before each border; the first border has none and the last one all.
        near: seconds of the tensors that cross it, without those in ``Skips.far``.
        limit: ``Skips.limit``.
        capacity: what the devices can take.
    """
    device, devices = capacity.largest_capacity, capacity.devices
    step = max(min(limit, device), capacity.free_capacity)
    crossing_cost = capacity.transfer_weight * near
    ahead, behind = np.zeros((2, len(work)), dtype=np.int64)
    kept = -1
    while True:
        ahead = _fewest(work, crossing_cost, 0, step, device, devices - behind)
        behind = _fewest(work[-1] - work, crossing_cost, len(work) - 1, step, device, devices - ahead)
        now = int(np.count_nonzero(ahead + behind <= devices))
        if now == kept:
            return ahead, behind
        kept = now


def _fewest(work: Floats, crossing_cost: Floats, start: int, step: float, device: float, most: Ints) -> Ints:
    """Return the least number of stages, up to ``most``, from border ``start`` to each border."""
    slack = 1e-11 * float(work.max())
    full, net = work + crossing_cost, work - crossing_cost
    found = np.full(len(work), np.iinfo(np.int32).max, dtype=np.int64)
    found[start] = 0
    best, farthest = 0.0, 0.0
    for used in range(1, int(most.max()) + 1):
        new = found > used
        new &= (full <= device + best + slack) | (work <= farthest + step + slack)
        if not new.any():
            break
        found[new] = used
        live = new & (most >= used)
        best = max(best, float(net[live].max(initial=0.0)))
        farthest = max(farthest, float(work[live].max(initial=0.0)))
    return found
