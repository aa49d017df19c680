"""The first section of the report: faster or slower than one device, what limits the plan, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...units import counted, format_bytes, format_seconds
from ..quantity import longer, percent
from .run import Run


class Figure(NamedTuple):
    """A main figure of a run: its name, the figure, and a remark."""

    name: str
    value: str
    remark: str


class Summary(NamedTuple):
    """What the first section shows of a run.

    name: of the run.
    verdict, reason: how fast the step is against one device, and the times behind that; empty without a prediction.
    findings: sentences on what limits the step and what to change.
    figures: the main figures.
    """

    name: str
    verdict: str
    reason: str
    findings: Sequence[str]
    figures: list[Figure]


def summary_section(runs: Sequence[Run]) -> list[Summary]:
    """Return the verdict, the findings and the main figures of each run."""
    return [Summary(run.name, *_verdict(run), run.findings, _figures(run)) for run in runs]


def _verdict(run: Run) -> tuple[str, str]:
    """Compare the step, measured if there is a trace, with the same micro-batches on one device."""
    step = run.measured or run.predicted
    if run.plan.prediction is None or step is None or not step.makespan:
        return "", "This plan was written by hand: without the costs of its layers there is no prediction."
    one_device = run.plan.prediction.serial_seconds
    times = one_device / step.makespan
    verdict = f"{times:.2f} times as fast as one device"
    if times < 0.995:
        verdict = f"Slower than one device: {verdict}"
    how = "measured" if run.measured else "predicted"
    reason = (
        f"a step of {format_seconds(step.makespan)} {how}, against {format_seconds(one_device)} for the same "
        "micro-batches on one device, by the profile"
    )
    return verdict, reason


def _figures(run: Run) -> list[Figure]:
    plan, predicted, measured = run.plan, run.predicted, run.measured
    replicas = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
    sizes = (
        f"{counted(len(plan.stages), 'stage')} on {counted(len(run.devices), 'device')}, "
        f"{counted(plan.micro_batches, 'micro-batch', 'es')}{replicas}"
    )
    figures = [Figure("Schedule", plan.schedule, sizes)]
    if predicted:
        idle = f"{percent(predicted.bubble)} of the devices’ time is idle"
        figures.append(Figure("Step, predicted", format_seconds(predicted.makespan), idle))
    if measured:
        against = ""
        if predicted and predicted.makespan:
            how = longer(measured.makespan / predicted.makespan, "as predicted")
            against = f"{how}, " if how == "as predicted" else f"{how} than predicted, "
        idle = f"{against}{percent(measured.bubble)} of the devices’ time is idle"
        figures.append(Figure("Step, measured", format_seconds(measured.makespan), idle))
    if plan.profile is not None and (step := measured or predicted) and step.makespan:
        rate = plan.profile.batch / step.makespan
        text = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"
        figures.append(Figure("Samples per second", text, f"{plan.profile.batch} a step"))
    if plan.prediction:
        figures.append(_memory(run))
    return figures


def _memory(run: Run) -> Figure:
    """Return the device whose memory is fullest; without limits, the one that needs most."""
    needs = run.plan.device_bytes()
    limits = {device.name: device.memory_bytes for device in run.plan.workers}
    shares = {name: need / limit for name, need in needs.items() if (limit := limits[name])}
    name = max(shares or needs, key=(shares or needs).__getitem__)
    limit = limits[name]
    of = f" of {format_bytes(limit)}" if limit else ""
    value = percent(shares[name]) if limit else format_bytes(needs[name])
    return Figure("Memory, fullest device", value, f"{name}: {format_bytes(needs[name])}{of}")
