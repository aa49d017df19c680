"""Compares two plans: choices, predicted figures, and layers that are in another stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from ..planning import Plan
from ..units import counted, format_bytes, format_seconds
from .folding import fold
from .quantity import NONE, longer
from .table import Column, FittingTable


def difference_reports(before: Plan, after: Plan, names: tuple[str, str]) -> list[RenderableType]:
    """Return tables of the differences between two plans, which may be of different models.

    Args:
        before, after: the plans.
        names: of them, for the columns.
    """
    reports: list[RenderableType] = []
    if before.profile and after.profile and before.profile.model != after.profile.model:
        models = f"{before.profile.model} and {after.profile.model}"
        reports.append(Text(f"The plans are of two models, {models}: their figures do not compare."))
    elif before.prediction and after.prediction:
        ratio = after.prediction.step_seconds / (before.prediction.step_seconds or 1.0)
        how = longer(ratio, "as long as", 1)
        than = "" if how == "as long as" else " than"
        reports.append(Text(f"The step of {names[1]} is predicted {how}{than} that of {names[0]}."))
    pairs = zip(_choices(before).items(), _choices(after).values(), strict=True)
    rows = [(what, first, second, "") for (what, first), second in pairs if first != second]
    figures = zip(_figures(before).items(), _figures(after).values(), strict=True)
    rows += [
        (what, text, other_text, f"{second / first - 1:+.1%}" if first and second else "")
        for (what, (text, first)), (other_text, second) in figures
        if text != other_text
    ]
    moved = _moved_table(before, after, names)
    if not rows and moved is None:
        return [Text("The plans are equal: the same stages, devices, schedule and predictions.")]
    if rows:
        what, firsts, seconds, change = zip(*rows, strict=True)
        columns = [
            Column("figure", what, text=True),
            Column(names[0], firsts, text=True),
            Column(names[1], seconds, text=True),
            Column("change", change, rank=1),
        ]
        reports.append(FittingTable("What differs", columns))
    return [*reports, moved] if moved else reports


def _choices(plan: Plan) -> dict[str, str]:
    """Return what was chosen, by the words for it."""
    profile = plan.profile
    return {
        "model": profile.model if profile else NONE,
        "samples": str(profile.batch) if profile else NONE,
        "schedule": plan.schedule,
        "micro-batches": str(plan.micro_batches),
        "stages": str(len(plan.stages)),
        "replicas": str(plan.replicas),
        "devices": str(len(plan.cluster) - len(plan.unused_devices)),
        "stages that recompute": _numbers([stage.recompute != "never" for stage in plan.stages]),
        "stages that offload": _numbers([stage.offload != "never" for stage in plan.stages]),
    }


def _figures(plan: Plan) -> dict[str, tuple[str, float | None]]:
    """Return predicted figures as text and number; without a number those of which no ratio is told."""
    if (predicted := plan.prediction) is None:
        names = ("step", "one device", "samples per second", "bubble", "bottleneck", "fullest device")
        return dict.fromkeys(names, (NONE, None))
    step, memory = predicted.step_seconds, max(predicted.memory_bytes)
    rate = plan.profile.batch / step if plan.profile and step else None
    return {
        "step": (format_seconds(step), step),
        "one device": (format_seconds(predicted.serial_seconds), predicted.serial_seconds),
        "samples per second": (f"{rate:,.0f}" if rate else NONE, rate),
        "bubble": (f"{predicted.bubble:.1%}", None),
        "bottleneck": (format_seconds(predicted.bottleneck_seconds), predicted.bottleneck_seconds),
        "fullest device": (format_bytes(memory), memory),
    }


def _numbers(stages: Sequence[bool]) -> str:
    return ", ".join(str(number) for number, chosen in enumerate(stages) if chosen) or NONE


def _moved_table(before: Plan, after: Plan, names: tuple[str, str]) -> FittingTable | None:
    """Make a table of the layers in another stage or on another device, one row for each run of them."""
    first, second = (
        {
            layer: f"stage {number} on {stage.device}"
            for number, stage in enumerate(plan.stages)
            for layer in stage.layers
        }
        for plan in (before, after)
    )
    moved = [layer for layer in {**first, **second} if first.get(layer) != second.get(layer)]
    if not moved:
        return None
    runs = [
        (", ".join(each.label for each in fold(list(layers))), *places)
        for places, layers in groupby(moved, lambda layer: (first.get(layer, NONE), second.get(layer, NONE)))
    ]
    layers, firsts, seconds = zip(*runs, strict=True)
    return FittingTable(
        f"{counted(len(moved), 'layer')} in another stage or on another device",
        [
            Column("layers", layers, text=True),
            Column(names[0], firsts, text=True),
            Column(names[1], seconds, text=True),
        ],
    )
