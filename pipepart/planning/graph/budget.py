"""Budget: the time after which a search returns the best that it has."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """A deadline on the scale of ``time.monotonic``; None for no limit."""

    end: float | None = None

    @staticmethod
    def of(seconds: float | None) -> Budget:
        """Return a budget that ends in this many seconds; None for no limit."""
        return Budget(None if seconds is None else time.monotonic() + seconds)

    @property
    def spent(self) -> bool:
        """Whether the deadline has passed."""
        return self.end is not None and time.monotonic() >= self.end


NO_LIMIT = Budget()
