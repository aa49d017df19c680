"""GapSearch: closes the gap between a cut and a lower bound by deciding bottlenecks in between."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .exact.decision import Decider, TooMuchWork
from .heuristics.local_moves import improve_by_moves
from .problem import Problem, Split

# A bottleneck counts as optimal if no other is smaller by more than this fraction.
RESOLUTION = 1e-9

# A gap below this fraction is not bisected: the next cut found usually closes it.
LITTLE = 1e-4


@dataclass(frozen=True)
class Budget:
    """When a search returns the best that it has, on the scale of ``time.monotonic``; None for no limit."""

    end: float | None = None

    @staticmethod
    def of(seconds: float | None) -> Budget:
        """Return a budget that ends in this many seconds; None for no limit."""
        return Budget(None if seconds is None else time.monotonic() + seconds)

    @property
    def spent(self) -> bool:
        """Whether the deadline has passed."""
        return self.end is not None and time.monotonic() >= self.end


@dataclass
class GapSearch:
    """A cut, its bottleneck and a lower bound; each decision moves one of them.

    Attributes:
        problem: what is cut.
        split: the best cut so far, or None.
        high: its bottleneck; without a cut, an upper bound on any.
        low: lower bound on the bottleneck of any cut among the decider's borders.
    """

    problem: Problem
    split: Split | None
    high: float
    low: float

    def close(self, decider: Decider, budget: Budget, resolution: float = RESOLUTION) -> bool:
        """Decide until the gap is below ``resolution``. Return False if the effort or the budget was spent before.

        The cut that was just found is often the best, so the first decision is just below it, which proves it. If
        there is a better cut, decisions just below a cut and in the middle of the gap take turns; after a proof that
        there is no cut, the gap is bisected.
        """
        just_below = True
        while self.high - self.low > resolution * self.high:
            if budget.spent:
                return False
            gap = self.high - self.low
            proves = just_below or gap <= LITTLE * self.high
            ask = self.high * (1 - resolution) if proves else self.high - gap / 2
            try:
                found = decider.split(ask)
            except TooMuchWork:
                return False
            if found is None:
                self.low = self.high if proves else ask
                just_below = False
                continue
            self.split = improve_by_moves(self.problem, found)
            self.high = self.split.bottleneck(self.problem)
            just_below = not just_below
        return True
