"""The section of the report on the costs of each layer: a strip of bars in execution order, and a table with bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...planning import Plan
from ...profiling import Profile
from ...units import format_bytes, format_seconds
from ..layers import layer_table
from ..quantity import printable
from ..table import Column, FittingTable
from .data_table import TABLE_ASSETS, data_table
from .run import Run
from .section import Section, render

_WIDTH = 1000  # of the strips, in units of their view box
_TIME_HEIGHT, _BYTES_HEIGHT = 120, 60
_COLOURS = 8  # series of the page
_MOST_BARS = 250
_TIMES = ("forward", "input", "weight")


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
    """Return the section with time, parameters and saved bytes of each layer; plans with equal profiles share it."""
    groups: list[tuple[Profile, list[Run]]] = []
    for run in runs:
        profile = run.plan.profile
        if profile is None:
            continue
        like = next((own for other, own in groups if other == profile), None)
        if like is None:
            groups.append((profile, [run]))
        else:
            like.append(run)
    if not groups:
        return None
    shown = [
        {
            "name": own[0].name if len(groups) > 1 else "",
            "strips": _strips(own[0].plan, profile),
            "bands": [(run.prefix, _bands(run.plan)) for run in own],
            "table": data_table(_table([run.plan for run in own], [run.name for run in own], profile)),
        }
        for profile, own in groups
    ]
    html = render("costs.html", runs=shown, width=_WIDTH, colours=_COLOURS)
    return Section("costs", "Costs per layer", html, assets=(*TABLE_ASSETS, "tips.js", "costs.css"))


def _strips(plan: Plan, profile: Profile) -> list[_Strip]:
    costs = profile.at(plan.micro_batches).layers
    times = [
        (cost.forward.seconds, cost.backward_input.seconds, cost.backward_weight.seconds) for cost in costs
    ]
    names = [printable(layer.name) for layer in profile.layers]
    saved = [(float(cost.saved_bytes),) for cost in costs]
    parameters = [(float(layer.parameter_bytes),) for layer in profile.layers]
    each = -(-len(names) // _MOST_BARS)  # layers of a bar
    names = [_ends(names[at : at + each]) for at in range(0, len(names), each)]
    times, saved, parameters = (_summed(values, each) for values in (times, saved, parameters))
    time_tips = [
        f"{name}: forward {format_seconds(forward)}, backward for inputs {format_seconds(own_input)}, for weights "
        f"{format_seconds(weight)}"
        for name, (forward, own_input, weight) in zip(names, times, strict=True)
    ]
    count = f", each bar {each} layers" if each > 1 else ""
    return [
        _strip(f"Time of one micro-batch{count}", _TIME_HEIGHT, times, _TIMES, time_tips, format_seconds),
        _byte_strip(f"Saved for the backward{count}", "saved", saved, names),
        _byte_strip(f"Parameters{count}", "parameters", parameters, names),
    ]


def _summed(values: Sequence[tuple[float, ...]], each: int) -> list[tuple[float, ...]]:
    """Add up the values of ``each`` neighbours."""
    groups = (values[at : at + each] for at in range(0, len(values), each))
    return [tuple(map(sum, zip(*group, strict=True))) for group in groups]


def _ends(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} – {names[-1]}"


def _byte_strip(title: str, word: str, sizes: Sequence[tuple[float, ...]], names: Sequence[str]) -> _Strip:
    tips = [f"{name}: {word} {format_bytes(size)}" for name, (size,) in zip(names, sizes, strict=True)]
    return _strip(title, _BYTES_HEIGHT, sizes, (word,), tips, format_bytes)


def _strip(
    title: str,
    height: int,
    values: Sequence[Sequence[float]],
    classes: Sequence[str],
    tips: Sequence[str],
    text: Callable[[float], str],
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


def _table(plans: Sequence[Plan], names: Sequence[str], profile: Profile) -> FittingTable:
    """Return the table of layers with the stage of each in each plan, without the spreads of the times."""
    table = layer_table(profile, plans[0].micro_batches)
    blank = [""] * (len(table.columns[0].cells) - len(profile.layers))
    stages = []
    for plan, name in zip(plans, names, strict=True):
        own = [str(number) for number, stage in enumerate(plan.stages) for _ in stage.layers]
        stages.append(Column(f"stage\n{name}" if len(plans) > 1 else "stage", [*own, *blank]))
    first, *others = (column for column in table.columns if column.header != "±")
    notes = [f"{note.partition('; ±')[0].removesuffix('.')}." for note in table.notes]
    return replace(table, columns=[first, *stages, *others], notes=notes)
