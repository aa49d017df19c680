"""Run: a plan with its measured steps, if there are any, and the name that the report gives it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from schedules import Timeline

from ...planning import Plan
from ...runtime.observe.trace import Trace


@dataclass(frozen=True)
class Run:
    """What a report shows: one plan, alone or with measured steps of it.

    Attributes:
        plan: as planned, or written by hand.
        trace: measured steps; None shows the prediction alone.
        name: tells it from the other plan of the report; empty if there is no other.
    """

    plan: Plan
    trace: Trace | None = None
    name: str = ""

    @cached_property
    def predicted(self) -> Timeline | None:
        """The step that the plan predicts; None for a plan written by hand, which has no costs."""
        if self.trace is not None:
            return self.trace.predicted
        return self.plan.simulate() if self.plan.prediction else None

    @cached_property
    def measured(self) -> Timeline | None:
        """The median of the measured steps; None without a trace."""
        return self.trace.median if self.trace else None

    @cached_property
    def timelines(self) -> dict[str, Timeline]:
        """The predicted and the measured step, by what to call them, where they exist."""
        both = {"predicted": self.predicted, "measured": self.measured}
        return {f"{self.prefix}{word}": found for word, found in both.items() if found is not None}

    @property
    def prefix(self) -> str:
        """The name with a colon, to stand before a word."""
        return f"{self.name}: " if self.name else ""

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices in the order of the schedule's rows."""
        return tuple(device.name for device in self.plan.workers)
