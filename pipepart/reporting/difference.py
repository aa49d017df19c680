"""Compares two plans: choices, predicted figures, and layers that are in another stage."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.text import Text

from ..document import Document, Value
from ..planning import Plan
from ..units import counted, format_bytes, format_seconds
from .folding import fold
from .quantity import NONE, longer
from .table import Column, FittingTable

_SECONDS = ("step_seconds", "serial_seconds", "bottleneck_seconds")


class Change(Value):
    """A figure or choice that differs between two plans; null if a plan does not have it.

    Attributes:
        what: its name, as ``"schedule"`` or ``"step_seconds"``.
        before, after: in the first and in the second plan.
    """

    what: str
    before: str | int | float | None
    after: str | int | float | None


class MovedLayer(Value):
    """A layer that is in another stage or on another device; null if a plan does not have the layer."""

    layer: str
    stage_before: int | None
    stage_after: int | None
    device_before: str | None
    device_after: str | None


class PlanDifference(Document):
    """Differences between two plans, as printed by ``pipepart explain A B``; empty lists for equal plans."""

    changes: tuple[Change, ...]
    layers: tuple[MovedLayer, ...]


def plan_difference(before: Plan, after: Plan) -> PlanDifference:
    """Return the differences between two plans, which may be of different models."""
    figures = zip(_figures(before).items(), _figures(after).values(), strict=True)
    return PlanDifference(
        changes=tuple(
            Change(what=what, before=own, after=other) for (what, own), other in figures if own != other
        ),
        layers=tuple(_moved(before, after)),
    )


def difference_reports(before: Plan, after: Plan, names: tuple[str, str]) -> list[RenderableType]:
    """Return tables of the differences between two plans.

    Args:
        before, after: the plans.
        names: of them, for the columns.
    """
    found = plan_difference(before, after)
    if not found.changes and not found.layers:
        return [Text("The plans are equal: the same stages, devices, schedule and predictions.")]
    reports: list[RenderableType] = []
    if before.profile and after.profile and before.profile.model != after.profile.model:
        models = f"{before.profile.model} and {after.profile.model}"
        reports.append(Text(f"The plans are of two models, {models}: their figures do not compare."))
    elif before.prediction and after.prediction:
        ratio = after.prediction.step_seconds / (before.prediction.step_seconds or 1.0)
        how = longer(ratio, "as long as", 1)
        than = "" if how == "as long as" else " than"
        reports.append(Text(f"The step of {names[1]} is predicted {how}{than} that of {names[0]}."))
    if found.changes:
        reports.append(
            FittingTable(
                "What differs",
                [
                    Column("figure", [_words(each.what) for each in found.changes], text=True),
                    Column(names[0], [_text(each.what, each.before) for each in found.changes], text=True),
                    Column(names[1], [_text(each.what, each.after) for each in found.changes], text=True),
                    Column("change", [_ratio(each) for each in found.changes], rank=1),
                ],
            )
        )
    if found.layers:
        kinds = {
            info.name: info.kind for plan in (before, after) if plan.profile for info in plan.profile.layers
        }
        reports.append(_layer_table(found, names, kinds))
    return reports


def _figures(plan: Plan) -> dict[str, str | int | float | None]:
    predicted = plan.prediction
    used = max(predicted.memory_bytes) if predicted else None
    return {
        "model": plan.profile and plan.profile.model,
        "samples": plan.profile and plan.profile.batch,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "stages": len(plan.stages),
        "chunks": plan.chunks,
        "replicas": plan.replicas,
        "devices": len({stage.device for stage in plan.stages}.union(*plan.replica_devices)),
        "recompute": ", ".join(str(at) for at, stage in enumerate(plan.stages) if stage.recompute != "never")
        or None,
        "offload": ", ".join(str(at) for at, stage in enumerate(plan.stages) if stage.offload != "never")
        or None,
        "step_seconds": predicted and predicted.step_seconds,
        "samples_per_second": plan.profile.batch / predicted.step_seconds
        if plan.profile and predicted and predicted.step_seconds
        else None,
        "bubble": predicted and predicted.bubble,
        "bottleneck_seconds": predicted and predicted.bottleneck_seconds,
        "serial_seconds": predicted and predicted.serial_seconds,
        "memory_bytes": used,
    }


def _moved(before: Plan, after: Plan) -> list[MovedLayer]:
    places = [
        {layer: (number, stage.device) for number, stage in enumerate(plan.stages) for layer in stage.layers}
        for plan in (before, after)
    ]
    found = []
    for layer in dict.fromkeys((*places[0], *places[1])):
        own, other = (place.get(layer, (None, None)) for place in places)
        if own != other:
            found.append(
                MovedLayer(
                    layer=layer,
                    stage_before=own[0],
                    stage_after=other[0],
                    device_before=own[1],
                    device_after=other[1],
                )
            )
    return found


def _layer_table(found: PlanDifference, names: tuple[str, str], kinds: Mapping[str, str]) -> FittingTable:
    """Layers that moved alike, one row for each run of them."""
    rows: list[tuple[list[str], str, str]] = []
    for each in found.layers:
        own = _place(each.stage_before, each.device_before)
        other = _place(each.stage_after, each.device_after)
        if rows and rows[-1][1:] == (own, other):
            rows[-1][0].append(each.layer)
        else:
            rows.append(([each.layer], own, other))
    return FittingTable(
        f"{counted(len(found.layers), 'layer')} in another stage or on another device",
        [
            Column(
                "layers",
                [
                    ", ".join(
                        one.label for one in fold(layers, [kinds.get(layer, layer) for layer in layers])
                    )
                    for layers, _, _ in rows
                ],
                text=True,
            ),
            Column(names[0], [own for _, own, _ in rows], text=True),
            Column(names[1], [other for _, _, other in rows], text=True),
        ],
    )


def _place(stage: int | None, device: str | None) -> str:
    return NONE if stage is None else f"stage {stage} on {device}"


def _words(what: str) -> str:
    return {
        "step_seconds": "step",
        "serial_seconds": "one device",
        "bottleneck_seconds": "bottleneck",
        "memory_bytes": "fullest device",
        "recompute": "stages that recompute",
        "offload": "stages that offload",
    }.get(what, what.replace("_", " ").replace("micro batches", "micro-batches"))


def _text(what: str, value: str | float | None) -> str:
    if value is None:
        return NONE
    if what in _SECONDS:
        return format_seconds(float(value))
    if what == "memory_bytes":
        return format_bytes(int(value))
    if what == "bubble":
        return f"{float(value):.1%}"
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def _ratio(change: Change) -> str:
    one, other = change.before, change.after
    if (
        change.what == "bubble"
        or not isinstance(one, float | int)
        or not isinstance(other, float | int)
        or not one
    ):
        return ""
    if change.what in (*_SECONDS, "samples_per_second", "memory_bytes"):
        return f"{other / one - 1:+.1%}"
    return ""
