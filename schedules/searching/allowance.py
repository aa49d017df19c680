"""Allowance: the work that a search may do, counted in operations, within the clock of its call."""

from __future__ import annotations

from collections.abc import Callable

from .clock import Clock

# Called now and then with the part of the allowance that is used, 0 to 1, and the shortest step so far in seconds.
Progress = Callable[[float, float], None]

# Of a search on one core of a slow server, half as fast as a good one. A search that may take so many for each second
# of its clock ends before the clock on most machines, so its result depends on its arguments alone.
OPERATIONS_PER_SECOND = 400_000
_LOOK_EVERY = 5_000  # operations between two looks at the clock


class Allowance:
    """What is left of the work that a search may do. The search counts its work here.

    Equal arguments and operations give equal results on every machine, unless the clock ends the search.

    Args:
        operations: to be dispatched in all; other work counts as so many as take equally long.
        clock: of the call; it may end the search early.
        progress: is called now and then.

    Attributes:
        operations: as given.
        used: operations so far.
        clock: as given.
    """

    def __init__(
        self, operations: float, clock: Clock | None = None, progress: Progress | None = None
    ) -> None:
        self.operations, self.clock = operations, clock or Clock()
        self.used = 0.0
        self._progress = progress
        self._looked = 0.0
        self._late = False

    def part(self, operations: float, share_of_clock: float) -> Allowance:
        """Return an allowance of so many operations, within a share (0 to 1) of the time that is left."""
        return Allowance(operations, self.clock.part(share_of_clock), self._progress)

    def spend(self, operations: float) -> None:
        """Count work that was done."""
        self.used += operations

    @property
    def is_over(self) -> bool:
        """Whether the search has to stop now."""
        if self.used >= self.operations:
            return True
        if not self._late and self.used - self._looked >= _LOOK_EVERY:
            self._looked = self.used
            self._late = self.clock.is_over
        return self._late

    def tell(self, step_seconds: float) -> None:
        """Report the shortest step so far."""
        if self._progress is not None:
            self._progress(min(1.0, self.used / max(self.operations, 1)), step_seconds)
