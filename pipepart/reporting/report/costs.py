"""The section of the report on the costs of each layer: a strip of bars in execution order, and a table with bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...planning import Plan
from ...profiling import Profile
from ...units import format_bytes, format_seconds
from ..layers import layer_table
from ..quantity import printable
from ..table import Column, FittingTable, bars
from .data_table import TABLE_ASSETS, data_table
from .run import Run
from .section import Section, render

_WIDTH = 1000  # of the strips, in units of their view box
_TIME_HEIGHT, _BYTES_HEIGHT = 120, 60
_COLOURS = 8  # series of the page


class _Bar(NamedTuple):
    """The bar of a layer: stacked parts, each with its class, its top and its height."""

    x: float
    width: float
    tip: str
    parts: list[tuple[str, float, float]]


class _Strip(NamedTuple):
    """One row of bars with a common scale."""

    title: str
    height: int
    largest: str
    bars: list[_Bar]


class _Band(NamedTuple):
    """The layers of a stage below the bars."""

    x: float
    width: float
    colour: int
    label: str
    tip: str


def costs_section(runs: Sequence[Run]) -> Section | None:
    """Return time, parameters and saved bytes of the layers; once, if both plans have the same profile."""
    shown: list[dict[str, object]] = []
    seen: list[Profile] = []
    for run in runs:
        profile = run.plan.profile
        if profile is None or profile in seen:
            continue
        seen.append(profile)
        strips = _strips(run.plan, profile)
        shown.append(
            {
                "name": run.name,
                "strips": strips,
                "bands": _bands(run.plan),
                "table": data_table(_table(run.plan, profile)),
            }
        )
    if not shown:
        return None
    html = render("costs.html", runs=shown, width=_WIDTH, colours=_COLOURS)
    return Section("costs", "Costs per layer", html, assets=(*TABLE_ASSETS, "tips.js", "costs.css"))


def _strips(plan: Plan, profile: Profile) -> list[_Strip]:
    costs = profile.at(plan.micro_batches).layers
    times = [
        (cost.forward.seconds, cost.backward_input.seconds, cost.backward_weight.seconds) for cost in costs
    ]
    names = [printable(layer.name) for layer in profile.layers]
    time_tips = [
        f"{name}: forward {format_seconds(forward)}, backward for inputs {format_seconds(own_input)}, for weights "
        f"{format_seconds(weight)}"
        for name, (forward, own_input, weight) in zip(names, times, strict=True)
    ]
    saved = [cost.saved_bytes for cost in costs]
    parameters = [layer.parameter_bytes for layer in profile.layers]
    return [
        _strip(
            "Time of one micro-batch",
            _TIME_HEIGHT,
            times,
            ("forward", "input", "weight"),
            time_tips,
            format_seconds,
        ),
        _strip("Saved for the backward", _BYTES_HEIGHT, *_sizes(saved, "saved", names), format_bytes),
        _strip("Parameters", _BYTES_HEIGHT, *_sizes(parameters, "parameters", names), format_bytes),
    ]


def _sizes(sizes: Sequence[int], word: str, names: Sequence[str]):
    tips = [f"{name}: {word} {format_bytes(size)}" for name, size in zip(names, sizes, strict=True)]
    return [(float(size),) for size in sizes], (word,), tips


def _strip(
    title: str,
    height: int,
    values: Sequence[Sequence[float]],
    classes: Sequence[str],
    tips: Sequence[str],
    text,
) -> _Strip:
    """Stack the values of each layer from the bottom up, scaled to the largest sum."""
    largest = max(map(sum, values))
    step = _WIDTH / len(values)
    found = []
    for place, (own, tip) in enumerate(zip(values, tips, strict=True)):
        top, parts = float(height), []
        for name, value in zip(classes, own, strict=True):
            tall = height * value / largest if largest else 0.0
            top -= tall
            if tall > 0.05:
                parts.append((name, top, tall))
        found.append(_Bar(place * step, step, tip, parts))
    return _Strip(title, height, text(largest), found)


def _bands(plan: Plan) -> list[_Band]:
    step = _WIDTH / sum(len(stage.layers) for stage in plan.stages)
    found, place = [], 0
    for number, stage in enumerate(plan.stages):
        width = len(stage.layers) * step
        tip = f"stage {number} on {printable(stage.device)}: {len(stage.layers)} layers"
        found.append(_Band(place * step, width, number % _COLOURS, str(number) if width > 14 else "", tip))
        place += len(stage.layers)
    return found


def _table(plan: Plan, profile: Profile) -> FittingTable:
    """Return the table of layers with the stage of each, and bars for what they save and for their parameters."""
    table = layer_table(profile, plan.micro_batches)
    stage_of = [str(number) for number, stage in enumerate(plan.stages) for _ in stage.layers]
    rows = len(table.columns[0].cells)
    blank = [""] * (rows - len(stage_of))
    costs = profile.at(plan.micro_batches).layers
    more = {
        "params": [layer.parameter_bytes for layer in profile.layers],
        "saved for backward": [cost.saved_bytes for cost in costs],
    }
    columns = [table.columns[0], Column("stage", [*stage_of, *blank])]
    for column in table.columns[1:]:
        if column.header == "±":
            continue
        columns.append(column)
        if sizes := more.get(column.called):
            largest = max(sizes) or 1
            columns.append(bars([*(size / largest for size in sizes), *([None] * len(blank))], rank=0))
    return replace(table, columns=columns)
