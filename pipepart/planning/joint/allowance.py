"""Allowance: how much work a search may do, counted in operations, with a deadline that only cuts it off."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Called now and then with the part of the allowance that is used, 0 to 1, and the shortest step so far in seconds.
Progress = Callable[[float, float], None]

OPERATIONS_PER_SECOND = 650_000  # dispatched and judged on one core of a small server; faster ones end early


@dataclass
class Allowance:
    """What is left of the work that a search may do. The search that gets it counts in it.

    Attributes:
        operations: to dispatch in all. A search with the same arguments and operations returns the same plan, unless
            the deadline ends it.
        deadline: on the clock of ``time.monotonic()``.
        progress: called now and then.
        used: operations so far.
    """

    operations: int
    deadline: float = float("inf")
    progress: Progress | None = None
    used: int = field(default=0, init=False)
    _late: bool = field(default=False, init=False)
    _looked: int = field(default=0, init=False)

    @property
    def spent(self) -> float:
        """The part that is used, 0 to 1; 1 after the deadline."""
        return 1.0 if self._late else min(1.0, self.used / max(self.operations, 1))

    @property
    def is_over(self) -> bool:
        """Whether nothing is left. Looks at the clock at most once in 5,000 operations."""
        if self.used - self._looked > 5000:
            self._looked = self.used
            self._late = time.monotonic() >= self.deadline
        return self._late or self.used >= self.operations

    def tell(self, step_seconds: float) -> None:
        """Report the shortest step so far."""
        if self.progress is not None:
            self.progress(self.spent, step_seconds)
