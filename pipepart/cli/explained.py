"""A plan and a measured step of it as one value, for JSON."""

from __future__ import annotations

from ..document import Document, Value
from ..planning import Plan
from ..runtime.observe.trace import Trace


class MeasuredStep(Value):
    """The median measured step.

    Attributes:
        step_seconds: from the first action's start to the last one's end.
        predicted_seconds: of the same step by the plan; None for a plan written by hand.
        bubble: idle fraction of the devices' time.
        busy_seconds: one number per device.
    """

    step_seconds: float
    predicted_seconds: float | None
    bubble: float
    busy_seconds: tuple[float, ...]


class Explained(Document):
    """What ``pipepart explain --trace FILE --json`` prints."""

    plan: Plan
    measured: MeasuredStep

    @classmethod
    def of(cls, plan: Plan, trace: Trace) -> Explained:
        """Collect the figures of the trace's median step."""
        median, predicted = trace.median, trace.predicted
        return cls(
            plan=plan,
            measured=MeasuredStep(
                step_seconds=median.makespan,
                predicted_seconds=predicted.makespan if predicted else None,
                bubble=median.bubble,
                busy_seconds=tuple(median.busy),
            ),
        )
