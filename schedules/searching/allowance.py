"""Allowance: the budget of a search in dispatched operations, within the time limit of its call."""

from __future__ import annotations

from .clock import Clock

# A small server dispatches about 700,000 operations a second. With this smaller budget, a search ends well before its
# time limit even on a machine half as fast, so its result depends on its arguments alone.
OPERATIONS_PER_SECOND = 200_000
_CHECK_EVERY = 5_000  # operations between two checks of the clock


class Allowance:
    """The budget of a search in operations. The search reports its work with :meth:`spend`.

    With equal arguments and budgets, results are equal on every machine, unless the clock ends the search.

    Args:
        operations: total to dispatch; other work is converted to the operations that take as long.
        clock: time limit of the call, which may end the search early.

    Attributes:
        operations: the total budget.
        used: operations spent so far.
        clock: the time limit.
    """

    def __init__(self, operations: float, clock: Clock | None = None) -> None:
        self.operations, self.clock = operations, clock or Clock()
        self.used = 0.0
        self._checked_at = 0.0
        self._time_over = False

    def part(self, operations: float, share_of_clock: float) -> Allowance:
        """Return a new allowance of ``operations``, limited to a share (0 to 1) of the remaining time."""
        return Allowance(operations, self.clock.part(share_of_clock))

    def spend(self, operations: float) -> None:
        """Add operations to the work done."""
        self.used += operations

    @property
    def is_over(self) -> bool:
        """True if the budget is spent or the time is over."""
        if self.used >= self.operations:
            return True
        if not self._time_over and self.used - self._checked_at >= _CHECK_EVERY:
            self._checked_at = self.used
            self._time_over = self.clock.is_over
        return self._time_over
