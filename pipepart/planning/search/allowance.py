"""Allowance: the steps and the time that a search may still take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Self

# Steps that a search takes in a second on one core of a slow machine. A step is one action of a schedule, played once.
STEPS_PER_SECOND = 1_000_000


class Allowance:
    """Ends a search after a number of steps, or at a deadline if the machine is slow.

    Steps decide, so that equal arguments give equal plans. The deadline only cuts a search off.

    Args:
        steps: that may be taken.
        deadline: a moment of :func:`time.monotonic`.
        progress: is called with the part of the steps that is used, from 0 to 1.

    Attributes:
        steps, deadline: as above.
        used: steps that were taken.

    >>> allowance = Allowance(steps=10)
    >>> allowance.spend(4), allowance.left, allowance.spend(6), allowance.is_over
    (True, 6, False, True)
    """

    def __init__(
        self, steps: float, deadline: float = math.inf, progress: Callable[[float], None] = lambda done: None
    ) -> None:
        self.steps, self.deadline, self.used = steps, deadline, 0
        self._progress = progress
        self._whole: Allowance | None = None

    @classmethod
    def of_seconds(cls, seconds: float, progress: Callable[[float], None] = lambda done: None) -> Self:
        """Return the allowance of so many seconds: the steps of as many on a slow machine, and the deadline."""
        return cls(seconds * STEPS_PER_SECOND, time.monotonic() + seconds, progress)

    @property
    def left(self) -> float:
        """Steps that may still be taken; 0 after the deadline."""
        return 0 if self.was_cut_off else max(self.steps - self.used, 0)

    @property
    def is_over(self) -> bool:
        """True if the search has to end."""
        return self.left <= 0

    @property
    def was_cut_off(self) -> bool:
        """True if the deadline has passed: the result then depends on the speed of the machine."""
        return time.monotonic() >= self.deadline

    def spend(self, steps: int = 1) -> bool:
        """Count steps that were taken; return True if the search may go on."""
        self._count(steps)
        return not self.is_over

    def part(self, steps: float) -> Allowance:
        """Return an allowance for a part of the search. Its steps count here too, and the deadline is the same."""
        made = Allowance(min(steps, self.left), self.deadline)
        made._whole = self
        return made

    def _count(self, steps: int) -> None:
        self.used += steps
        if self._whole is not None:
            self._whole._count(steps)
        elif self.steps:
            self._progress(min(self.used / self.steps, 1.0))
