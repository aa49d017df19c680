"""What steps of a pipeline took, held against what its plan says that a step takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import schedules
from schedules import Timeline

from ...planning import Plan
from .. import Recorder, Stage


class Trace:
    """Measured steps of a plan, in the order in which they ran.

    On accelerators the times are read when somebody asks for them, who then waits for the devices.

    Args:
        plan: that they are steps of.
        steps: measured ones; :meth:`pipepart.Pipeline.trace` adds those that run.
        memory: whether what devices keep for their backwards is counted in those.
    """

    def __init__(self, plan: Plan, steps: Sequence[Timeline] = (), memory: bool = False) -> None:
        self.plan = plan
        self.memory = memory
        self._steps: list[Timeline | Recorder] = list(steps)
        self._forwards: list[Timeline | Recorder] = []

    @property
    def steps(self) -> list[Timeline]:
        """Each step, forward and backward of a mini-batch."""
        return list(map(_timeline, self._steps))

    @property
    def forwards(self) -> list[Timeline]:
        """Each call of the pipeline in the place of the model, its forwards alone."""
        return list(map(_timeline, self._forwards))

    @property
    def median(self) -> Timeline:
        """The step with the median makespan, of those with as many micro-batches as the plan has.

        Raises:
            ValueError: there is none.
        """
        whole = [step for step in self.steps if step.schedule.micro_batches == self.plan.micro_batches]
        if not whole:
            raise ValueError(
                f"no step of {self.plan.micro_batches} micro-batches was traced: run pipe.step within "
                "`with pipe.trace() as trace`"
            )
        return sorted(whole, key=lambda step: step.makespan)[(len(whole) - 1) // 2]

    @cached_property
    def predicted(self) -> Timeline | None:
        """A step as the plan predicts it; None for a plan written by hand, which has no costs."""
        return self.plan.simulate() if self.plan.prediction else None

    @property
    def ratio(self) -> float | None:
        """The predicted step over the median one; below 1 where steps take longer than predicted.

        Raises:
            ValueError: no step was traced.
        """
        median = self.median
        return self.predicted.makespan / median.makespan if self.predicted else None

    def save(self, path: str | Path) -> None:
        """Writes the median step and the predicted one as a Chrome trace, one process each, for ui.perfetto.dev.

        ``schedules.Timeline.from_trace(json.load(file))`` reads the measured one back.

        Raises:
            ValueError: no step was traced.
            OSError: the file cannot be written.
        """
        timelines = {"measured": self.median}
        if self.predicted:
            timelines["predicted"] = self.predicted
        Path(path).write_text(json.dumps(schedules.side_by_side(timelines)))

    def __repr__(self) -> str:
        return f"<Trace of {len(self._steps)} steps of {self.plan.schedule}>"


class Traces:
    """The traces of one pipeline that are open, and its last step.

    Args:
        plan: of the pipeline.
        always: whether to keep the last step while no trace is open, too.
    """

    def __init__(self, plan: Plan, always: bool) -> None:
        self._plan = plan
        self._always = always
        self._open: list[Trace] = []
        self._last: Recorder | None = None

    @property
    def last(self) -> Timeline | None:
        """The last step that was traced."""
        return self._last and self._last.timeline

    @contextmanager
    def opened(self, memory: bool) -> Iterator[Trace]:
        """A trace of what runs within the block."""
        trace = Trace(self._plan, memory=memory)
        self._open.append(trace)
        try:
            yield trace
        finally:
            self._open.remove(trace)

    def recorder(
        self, schedule: schedules.Schedule, stages: Sequence[Stage], mini_batch: Any = None
    ) -> Recorder | None:
        """For a run that begins, on its micro-batches; None where nobody asks for its times."""
        if not self._always and not self._open:
            return None
        counted = any(trace.memory for trace in self._open)
        return Recorder(schedule, stages, mini_batch if counted else None)

    def add_step(self, recorder: Recorder | None) -> None:
        """A step has run."""
        if recorder:
            self._last = recorder
            for trace in self._open:
                trace._steps.append(recorder)

    def add_forward(self, recorder: Recorder | None) -> None:
        """All forwards of a mini-batch have run."""
        if recorder:
            for trace in self._open:
                trace._forwards.append(recorder)


def _timeline(step: Timeline | Recorder) -> Timeline:
    return step.timeline if isinstance(step, Recorder) else step
