"""GapSearch: closes the gap between a cut and a lower bound by deciding bottlenecks in between."""

from __future__ import annotations

from dataclasses import dataclass

from .budget import Budget
from .exact.decision import Decider, TooMuchWork
from .heuristics.local_moves import improve_by_moves
from .problem import Problem, Split

# A bottleneck counts as optimal if no other is smaller by more than this fraction.
RESOLUTION = 1e-9

# A gap below this fraction is not bisected: the next cut found usually closes it.
LITTLE = 1e-4

# The first step down, where the cut is likely to be good.
STEP = 2e-3


@dataclass
class GapSearch:
    """A cut, its bottleneck and a lower bound; each decision moves one of them.

    Attributes:
        problem: what is cut.
        split: the best cut so far, or None.
        high: its bottleneck; without a cut, an upper bound on any.
        low: lower bound on the bottleneck of any cut among the decider's borders.
        step: the first step down from a cut that was not the last, as a fraction.
    """

    problem: Problem
    split: Split | None
    high: float
    low: float
    step: float = STEP

    def close(self, decider: Decider, budget: Budget, resolution: float = RESOLUTION) -> bool:
        """Decide until the gap is below ``resolution``. Return False if the effort or the budget was spent before.

        The cut that was just found is usually the best, so the first decision is just below it. If there is a better
        cut, the steps down grow. After the first step without a cut, the gap is bisected.
        """
        step, fresh = self.step, True
        while self.high - self.low > resolution * self.high:
            if budget.spent:
                return False
            gap = self.high - self.low
            if fresh or gap <= LITTLE * self.high:
                ask = self.high * (1 - resolution)
            else:
                ask = self.high - min(gap / 2, step * self.high)
            try:
                found = decider.split(ask)
            except TooMuchWork:
                return False
            if found is None:
                self.low = self.high if ask >= self.high * (1 - resolution) else ask
                fresh = False
                continue
            self.split = improve_by_moves(self.problem, found)
            self.high = self.split.bottleneck(self.problem)
            step, fresh = (step, True) if not fresh else (4 * step, False)
        return True
