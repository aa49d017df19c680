"""Run: a plan with its measured steps, if there are any, and its name in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from schedules import Timeline

from ...planning import Plan
from ...runtime.observe.trace import Trace
from ..findings import findings


@dataclass(frozen=True)
class Run:
    """A plan to show in a report, alone or with measured steps.

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
        """The predicted step; None for a plan written by hand, which has no costs."""
        if self.trace is not None:
            return self.trace.predicted
        return self.plan.simulate() if self.plan.prediction else None

    @cached_property
    def measured(self) -> Timeline | None:
        """The median of the measured steps; None without a trace."""
        return self.trace.median if self.trace else None

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """Sentences on what limits the plan and what to change first; see :func:`~pipepart.reporting.findings`."""
        return findings(self.plan, self.trace)

    @property
    def prefix(self) -> str:
        """The name with a colon, as a prefix of titles."""
        return f"{self.name}: " if self.name else ""

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices in the order of the schedule's rows."""
        return tuple(device.name for device in self.plan.workers)

    @cached_property
    def row_names(self) -> tuple[str, ...]:
        """Names of the schedule's rows: the devices, with the replica if there are several."""
        if self.plan.replicas == 1:
            return self.devices
        rows = len(self.devices) // self.plan.replicas
        return tuple(f"{name}, replica {row // rows}" for row, name in enumerate(self.devices))


def have_one_plan(runs: Sequence[Run]) -> bool:
    """Return True for two runs of one plan, whose figures that are predicted are shown once."""
    return len(runs) > 1 and all(run.plan == runs[0].plan for run in runs)


def timelines_of(runs: Sequence[Run]) -> list[tuple[Run, str, Timeline]]:
    """Return the predicted and measured timelines of each run, where they exist, with their names.

    The prediction of two runs of one plan is there once.
    """
    one_plan = have_one_plan(runs)
    timelines = []
    for number, run in enumerate(runs):
        if run.predicted is not None and not (one_plan and number):
            timelines.append((run, "predicted" if one_plan else f"{run.prefix}predicted", run.predicted))
        if run.measured is not None:
            timelines.append((run, f"{run.prefix}measured", run.measured))
    return timelines
