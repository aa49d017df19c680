"""Compares two plans: their figures, the memory of their devices, and the layers that another device runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from schedules import Timeline

from ..planning import Plan
from ..units import format_seconds
from .folding import fold
from .plan_tables import stage_numbers
from .quantity import NONE, percent, size
from .table import Column, FittingTable

_Row = tuple[str, str, str, str]  # what, of one plan, of the other, and the change


def difference_tables(
    one: Plan,
    other: Plan,
    names: tuple[str, str] = ("A", "B"),
    measured: tuple[Timeline | None, Timeline | None] = (None, None),
) -> list[FittingTable]:
    """Return tables of what differs between two plans. Equal figures are shown, equal layers and devices are not.

    Args:
        one: any plan.
        other: another plan, of the same model or of another one.
        names: of the two plans, as headers.
        measured: a measured step of each.
    """
    tables = [_table("Figures", "figure", names, _figures(one, other, measured))]
    if memory := _memory(one, other):
        tables.append(_table("Devices whose memory differs, at most", "device", names, memory))
    if layers := _layers(one, other):
        tables.append(_table("Layers that differ in their device", "layers", names, layers, change=False))
    return tables


def _table(
    title: str, what: str, names: tuple[str, str], rows: Sequence[_Row], change: bool = True
) -> FittingTable:
    cells = list(zip(*rows, strict=True))
    columns = [
        Column(what, cells[0], text=True),
        Column(names[0], cells[1], text=not change),
        Column(names[1], cells[2], text=not change),
    ]
    return FittingTable(title, [*columns, Column("change", cells[3])] if change else columns)


def _figures(one: Plan, other: Plan, measured: tuple[Timeline | None, Timeline | None]) -> list[_Row]:
    plans = (one, other)
    rows = [
        _seconds("step, predicted", *(plan.prediction and plan.prediction.step_seconds for plan in plans)),
        _seconds("step, measured", *(step and step.makespan for step in measured)),
        _shares("bubble, predicted", *(plan.prediction and plan.prediction.bubble for plan in plans)),
        _shares("bubble, measured", *(step and step.bubble for step in measured)),
        _sizes("memory, largest", *(plan.prediction and max(plan.prediction.memory_bytes) for plan in plans)),
        _sizes(
            "memory, all devices", *(plan.prediction and sum(plan.prediction.memory_bytes) for plan in plans)
        ),
        _words("schedule", *(plan.schedule for plan in plans)),
        _counts("micro-batches", *(plan.micro_batches for plan in plans)),
        _counts("stages", *(len(plan.stages) for plan in plans)),
        _counts("devices", *(len(plan.workers) for plan in plans)),
        _counts("replicas", *(plan.replicas for plan in plans)),
        _words("stages that recompute", *map(_recomputing, plans)),
        _words("stages that offload", *map(_offloading, plans)),
    ]
    return [row for row in rows if row is not None]


def _seconds(what: str, one: float | None, other: float | None) -> _Row | None:
    if one is None and other is None:
        return None
    return what, _or_none(one, format_seconds), _or_none(other, format_seconds), _relative(one, other)


def _sizes(what: str, one: int | None, other: int | None) -> _Row | None:
    if one is None and other is None:
        return None
    return what, size(one), size(other), _relative(one, other)


def _shares(what: str, one: float | None, other: float | None) -> _Row | None:
    if one is None and other is None:
        return None
    change = "" if one is None or other is None else f"{100 * (other - one):+.1f} points"
    same = change in ("+0.0 points", "-0.0 points")
    return what, _or_none(one, percent), _or_none(other, percent), "same" if same else change


def _counts(what: str, one: int, other: int) -> _Row:
    return what, str(one), str(other), f"{other - one:+d}" if one != other else "same"


def _words(what: str, one: str, other: str) -> _Row:
    return what, one, other, "same" if one == other else "differs"


def _or_none(value: float | None, text) -> str:
    return NONE if value is None else text(value)


def _relative(one: float | None, other: float | None) -> str:
    """Format the change from one figure to the other."""
    if not one or other is None:
        return ""
    change = f"{other / one - 1:+.1%}"
    return "same" if change in ("+0.0%", "-0.0%") else change


def _recomputing(plan: Plan) -> str:
    found = [number for number, stage in enumerate(plan.stages) if stage.recompute != "never"]
    return stage_numbers(found) or "none"


def _offloading(plan: Plan) -> str:
    found = [number for number, stage in enumerate(plan.stages) if stage.offload != "never"]
    return stage_numbers(found) or "none"


def _memory(one: Plan, other: Plan) -> list[_Row]:
    needs = [plan.device_bytes() if plan.prediction else {} for plan in (one, other)]
    names = dict.fromkeys([*needs[0], *needs[1]])
    return [
        (name, size(first), size(second), _relative(first, second))
        for name in names
        if (first := needs[0].get(name)) != (second := needs[1].get(name))
    ]


def _layers(one: Plan, other: Plan) -> list[_Row]:
    """Return the layers that are on different devices, or in one plan only; folded, in the order of the model."""
    places = [
        {layer: stage.device for stage in plan.stages for layer in stage.layers} for plan in (one, other)
    ]
    names = list(dict.fromkeys([*places[0], *places[1]]))
    pairs = [(places[0].get(name, NONE), places[1].get(name, NONE)) for name in names]
    rows = []
    for pair, group in groupby(zip(names, pairs, strict=True), key=lambda each: each[1]):
        if pair[0] != pair[1]:
            rows += [(each.label, *pair, "") for each in fold([name for name, _ in group])]
    return rows
