"""The JSON that commands print, for those that print no profile, plan, cluster or report of a check."""

from __future__ import annotations

from typing import Any

from ..document import ByteCount, Document, Seconds, Value
from ..planning import Plan


class MeasuredStep(Value):
    """A measured step of a plan: the median of a trace.

    Attributes:
        step_seconds: from the first action to the last.
        predicted_seconds: of the plan; null for one written by hand.
        bubble: idle fraction of the devices.
        busy_seconds: one number a device.
    """

    step_seconds: Seconds
    predicted_seconds: Seconds | None
    bubble: float
    busy_seconds: tuple[Seconds, ...]


class ExplainedTrace(Document):
    """A plan and a measured step of it: ``pipepart explain PLAN --trace FILE``."""

    plan: Plan
    measured: MeasuredStep


class Suggested(Value):
    """A change of a request that fits.

    Attributes:
        change: keywords of ``pipepart.plan``.
        command_line: options of ``pipepart plan`` to add.
        options: the keywords and their values.
        devices: names of devices to add.
        memory_limit: bytes that each device has to have; null to keep them.
        estimated: the costs at this micro-batch size are estimates.
        step_seconds, memory_bytes: of the plan, the memory of the fullest device.
    """

    change: str
    command_line: str
    options: dict[str, Any]
    devices: tuple[str, ...]
    memory_limit: ByteCount | None
    estimated: bool
    step_seconds: Seconds
    memory_bytes: ByteCount


class InfeasibleResult(Document):
    """A model that does not fit: ``pipepart plan --json`` with exit status 1.

    Attributes:
        error: always "infeasible".
        reason: in words.
        stage: that lacks most.
        deficit_bytes: that its device lacks; 0 if no memory would be enough.
        suggestions: changes that fit, the shortest step first.
    """

    error: str = "infeasible"
    reason: str
    stage: int
    deficit_bytes: ByteCount
    suggestions: tuple[Suggested, ...]


class ReportResult(Document):
    """A report that was written: ``pipepart report --json``.

    Attributes:
        file: the page.
        bytes: its size.
        findings: for each plan, what limits it and what to change first, in words.
    """

    file: str
    bytes: ByteCount
    findings: tuple[tuple[str, ...], ...]


class ExportResult(Document):
    """A plan in the files of another engine.

    Attributes:
        engine: its name.
        files: the text of each file, by its name.
        notes: what to tell the engine beside the files.
    """

    engine: str
    files: dict[str, str]
    notes: tuple[str, ...]
