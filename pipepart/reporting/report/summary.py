"""The first section of the report: what limits the plan, what to change first, and its main figures."""

from __future__ import annotations

from collections.abc import Sequence

from ...units import counted, format_bytes, format_seconds
from ..quantity import longer, percent
from .run import Run
from .section import Section, render


def summary_section(runs: Sequence[Run]) -> Section:
    """Return the findings and the main figures of each run."""
    shown = [
        {
            "name": run.name,
            "findings": run.findings,
            "by_hand": run.plan.prediction is None,
            "facts": _facts(run),
        }
        for run in runs
    ]
    return Section("summary", "Summary", render("summary.html", runs=shown))


def _facts(run: Run) -> list[tuple[str, str, str]]:
    """Return the main figures: what each is, the figure, and a remark."""
    plan, predicted, measured = run.plan, run.predicted, run.measured
    replicas = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
    facts = [
        (
            "Schedule",
            plan.schedule,
            f"{counted(len(plan.stages), 'stage')} on {counted(len(run.devices), 'device')}, "
            f"{counted(plan.micro_batches, 'micro-batch', 'es')}{replicas}",
        )
    ]
    if predicted:
        idle = f"{percent(predicted.bubble)} of the devices’ time is idle"
        facts.append(("Step, predicted", format_seconds(predicted.makespan), idle))
    if measured:
        against = ""
        if predicted and predicted.makespan:
            against = f"{longer(measured.makespan / predicted.makespan, 'as predicted')}, "
        idle = f"{against}{percent(measured.bubble)} of the devices’ time is idle"
        facts.append(("Step, measured", format_seconds(measured.makespan), idle))
    if plan.profile is not None and (step := measured or predicted) and step.makespan:
        rate = plan.profile.batch / step.makespan
        facts.append(
            (
                "Samples per second",
                f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}",
                f"{plan.profile.batch} a step",
            )
        )
    if plan.prediction:
        facts.append(_memory(run))
    return facts


def _memory(run: Run) -> tuple[str, str, str]:
    """Return the device whose memory is fullest; without limits, the one that needs most."""
    needs = run.plan.device_bytes()
    limits = {device.name: device.memory_bytes for device in run.plan.workers}
    shares = {name: need / limit for name, need in needs.items() if (limit := limits[name])}
    name = max(shares or needs, key=(shares or needs).__getitem__)
    limit = limits[name]
    of = f" of {format_bytes(limit)}" if limit else ""
    return (
        "Memory, fullest device",
        f"{percent(shares[name])}" if limit else format_bytes(needs[name]),
        (f"{name}: {format_bytes(needs[name])}{of}"),
    )
