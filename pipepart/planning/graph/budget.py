"""Clock: when a search that was given a time has to settle for what it has."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """The moment at which time is up, on the scale of ``time.monotonic``; None for no limit."""

    end: float | None = None

    @staticmethod
    def of(seconds: float | None) -> Clock:
        """A clock that runs from now on."""
        return Clock(None if seconds is None else time.monotonic() + seconds)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.end is not None and time.monotonic() >= self.end


NO_LIMIT = Clock()
