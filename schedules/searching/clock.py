"""Clock: the time limit of one call, shared by all searches within the call."""

from __future__ import annotations

import math
import time


class OutOfTime(Exception):
    """The time of a search is over; its caller continues without the result."""


class Clock:
    """The time limit of one call, counted from the creation of this object.

    A search gives the same result on every machine as long as every check finds time left. ``cut_short`` is True if a
    check found none, that is, if the result may depend on the speed of the machine.

    Args:
        seconds: the limit; infinity for none.

    Attributes:
        cut_short: True if a search stopped or skipped work because of this clock or a part of it.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._deadline = time.monotonic() + seconds
        self._whole = self
        self.cut_short = False

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, 0 after it. Does not set ``cut_short``."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        """True if the deadline has passed; then also sets ``cut_short``."""
        return not self.has(0.0)

    def check(self) -> None:
        """Raise :class:`OutOfTime` if the deadline has passed."""
        if self.is_over:
            raise OutOfTime

    def has(self, seconds: float) -> bool:
        """Return True if more than ``seconds`` are left; otherwise set ``cut_short``."""
        if self._deadline - time.monotonic() > seconds:
            return True
        self._whole.cut_short = True
        return False

    def part(self, share: float) -> Clock:
        """Return a clock for a share (0 to 1) of the remaining seconds; it sets ``cut_short`` of this clock, too."""
        clock_of_part = Clock()
        clock_of_part._deadline = time.monotonic() + share * self.seconds_left if share else time.monotonic()
        clock_of_part._whole = self._whole
        return clock_of_part
