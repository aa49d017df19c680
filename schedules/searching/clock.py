"""Clock: the time that one call may take. Every search within the call looks at the same one."""

from __future__ import annotations

import math
import time


class OutOfTime(Exception):
    """The clock of a search is over; whoever started the search goes on without its result."""


class Clock:
    """The time that one call may take, from the moment that this object is made.

    A search that does not ask the clock, or is told that time is left, gives the same result on every machine. So
    whether the result depends on the machine is known: ``cut_short`` is True if any search was told to stop.

    Args:
        seconds: that may pass; infinity for no limit.

    Attributes:
        cut_short: whether a search stopped, or left something out, because of this clock or a part of it.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._deadline = time.monotonic() + seconds
        self._whole = self
        self.cut_short = False

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; 0 after it. Reading them does not count as stopping."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the caller has to stop now. The clock remembers that it said so."""
        return not self.has(0.0)

    def check(self) -> None:
        """Raise :class:`OutOfTime` if the clock is over."""
        if self.is_over:
            raise OutOfTime

    def has(self, seconds: float) -> bool:
        """Return whether more than so many seconds are left; False counts as stopping a search."""
        if self._deadline - time.monotonic() > seconds:
            return True
        self._whole.cut_short = True
        return False

    def part(self, share: float) -> Clock:
        """Return a clock for a share (0 to 1) of the seconds that are left; a search that it stops counts here, too."""
        made = Clock()
        made._deadline = time.monotonic() + share * self.seconds_left if share else time.monotonic()
        made._whole = self._whole
        return made
