"""Trace: measured steps of a pipeline, compared with the step that its plan predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from pydantic_core import to_json

import schedules
from schedules import Timeline
from schedules.pictures.draw import Drawn
from schedules.pictures.svg import Panel

from ...input_error import InputError
from ...pages import notebook_html, to_html
from ...planning import Plan
from ...whole_file import write_whole
from ..stage import Stage
from .recorder import Recorder


class Trace(Drawn):
    """Measured steps of a plan, in the order in which they ran.

    On accelerators, reading the times waits for the devices.

    Args:
        plan: the plan of the pipeline.
        steps: measured steps; :meth:`pipepart.Pipeline.trace` adds each step that runs.

    Attributes:
        memory_bytes: of ``pipe.trace(memory=True)``, the most bytes that each strict device had, by its name; to be
            held against ``plan.device_bytes()``. Empty on other devices.
    """

    def __init__(self, plan: Plan, steps: Sequence[Timeline] = ()) -> None:
        self.plan = plan
        self.memory_bytes: dict[str, int] = {}
        self._steps: list[Timeline | Recorder] = list(steps)

    @property
    def steps(self) -> list[Timeline]:
        """The training steps: forward and backward of a mini-batch each."""
        return list(map(_timeline, self._steps))

    @property
    def median(self) -> Timeline:
        """The step with the median makespan, among steps with the plan's number of micro-batches.

        Raises:
            ValueError: there is no such step.
        """
        whole = [step for step in self.steps if step.schedule.micro_batches == self.plan.micro_batches]
        if not whole:
            raise InputError(
                f"no step of {self.plan.micro_batches} micro-batches was traced: run pipe.step within "
                "`with pipe.trace() as trace`"
            )
        return sorted(whole, key=lambda step: step.makespan)[(len(whole) - 1) // 2]

    @cached_property
    def predicted(self) -> Timeline | None:
        """The step that the plan predicts; None for a plan written by hand, which has no costs."""
        return self.plan.simulate() if self.plan.prediction else None

    @property
    def ratio(self) -> float | None:
        """Predicted step time / median step time; below 1 if steps take longer than predicted.

        Raises:
            ValueError: no step was traced.
        """
        median = self.median
        return self.predicted.makespan / median.makespan if self.predicted else None

    def save(self, path: str | Path) -> None:
        """Write the median and the predicted step as a Chrome trace, one process each, for ui.perfetto.dev.

        Each device is a thread, with counters of its micro-batches in flight and of its stash. The stash has the sizes
        of the plan. ``schedules.Timeline.from_trace(json.load(file))`` reads the measured step back.

        Raises:
            ValueError: no step was traced.
            OSError: the file cannot be written.
        """
        names = [device.name for device in self.plan.workers]
        costs = self.plan.stage_costs() if self.predicted else None
        write_whole(path, to_json(schedules.side_by_side(self._timelines, names, costs)))

    def panels(self, labels: Sequence[str] | None = None) -> list[Panel]:
        """Return the measured and the predicted step, as a picture draws them."""
        names = [device.name for device in self.plan.workers] if labels is None else labels
        return [Panel(name, timeline, names) for name, timeline in self._timelines.items()]

    @property
    def _timelines(self) -> dict[str, Timeline]:
        timelines = {"measured": self.median}
        if self.predicted:
            timelines["predicted"] = self.predicted
        return timelines

    def to_html(self) -> str:
        """Return the measured and the predicted step as an HTML page that needs no other file and no network.

        Raises:
            ValueError: no step was traced.
        """
        return to_html(self)

    def __repr__(self) -> str:
        return f"<Trace of {len(self._steps)} steps of {self.plan.schedule}>"

    def _repr_html_(self) -> str:
        """Show the median step beside the predicted one in a notebook."""
        return notebook_html(self)


class Traces:
    """The open traces of one pipeline, and its last step.

    Args:
        plan: of the pipeline.
        always: whether to keep the last step even if no trace is open.
    """

    def __init__(self, plan: Plan, always: bool) -> None:
        self._plan = plan
        self._always = always
        self._open: list[Trace] = []
        self._last: Recorder | None = None

    @property
    def last(self) -> Timeline | None:
        """Return the last step that was traced."""
        return self._last and self._last.timeline

    @property
    def wanted(self) -> bool:
        """Whether a run that begins now is recorded."""
        return self._always or bool(self._open)

    @contextmanager
    def opened(self) -> Iterator[Trace]:
        """Open a trace of the steps that run within the block."""
        trace = Trace(self._plan)
        self._open.append(trace)
        try:
            yield trace
        finally:
            self._open.remove(trace)

    def recorder(self, schedule: schedules.Schedule, stages: Sequence[Stage]) -> Recorder | None:
        """Return a recorder for a run that begins; None if no trace is open."""
        return Recorder(schedule, stages) if self.wanted else None

    def add_step(self, recorder: Recorder | None) -> None:
        """Add a step that has run to the open traces."""
        if recorder:
            self._last = recorder
            for trace in self._open:
                trace._steps.append(recorder)


def _timeline(step: Timeline | Recorder) -> Timeline:
    return step.timeline if isinstance(step, Recorder) else step
