"""The JSON printed by commands whose result is no profile, plan, cluster or check report."""

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
    """

    engine: str
    files: dict[str, str]


class SimulatedDevice(Value):
    """A device in a simulated step.

    Attributes:
        device: its name, or number.
        stages: that it runs.
        busy_seconds: in which it computes.
        producer_seconds, transfer_seconds: in which it waits for another device, and for a message or a copy.
        finished_seconds: after its last action.
        peak_stash_bytes: the most that it keeps for backwards; micro-batches in flight if no stash was described.
    """

    device: str
    stages: tuple[int, ...]
    busy_seconds: Seconds
    producer_seconds: float
    transfer_seconds: float
    finished_seconds: float
    peak_stash_bytes: float


class SimulatedStep(Document):
    """A simulated step: ``pipepart simulate`` of one schedule.

    Attributes:
        schedule: its name.
        micro_batches: of all replicas.
        makespan_seconds: from the first action to the last.
        bubble: idle fraction of the devices.
        zero_bubble: the bubble if each device starts its next step as soon as it has finished this one.
        bound_seconds: that no schedule of these stages on these devices can beat; 0 if unknown.
        devices: one each.
        actions: of each device, as ``"3F5"``: stage 3, forward, micro-batch 5.
    """

    schedule: str
    micro_batches: int
    makespan_seconds: Seconds
    bubble: float
    zero_bubble: float
    bound_seconds: Seconds
    devices: tuple[SimulatedDevice, ...]
    actions: tuple[tuple[str, ...], ...]


class SimulatedSteps(Document):
    """Simulated steps of several schedules, in the order of the command line."""

    schedules: tuple[SimulatedStep, ...]
