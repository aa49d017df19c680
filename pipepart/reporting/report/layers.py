"""The section of the report with the layers: their times as bars in execution order over their stages, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...planning import Plan
from ...profiling import Profile
from ...units import counted, format_bytes, format_seconds
from ..layers import layer_table
from ..table import Column, FittingTable
from .run import Run

_LOOKS = ("kind-f", "kind-i", "kind-w")


class Bar(NamedTuple):
    """The bar of a layer. ``left``, and of its parts look, top and height, are percentages of the picture."""

    left: float
    parts: list[tuple[str, float, float]]
    tip: str


class Band(NamedTuple):
    """The layers of a stage under the bars, in percent; ``label`` is empty where it does not fit."""

    left: float
    width: float
    label: str
    tip: str


class Layers(NamedTuple):
    """The layers of a model.

    name: of the run; empty if all runs have these layers.
    largest: the time of the highest bar.
    width: of a bar, in percent.
    bands: of each run, with its name.
    """

    name: str
    largest: str
    width: float
    bars: list[Bar]
    bands: list[tuple[str, list[Band]]]
    table: FittingTable


def layers_section(runs: Sequence[Run]) -> list[Layers] | None:
    """Return time, parameters and saved bytes of each layer; runs with equal profiles share them."""
    known = [(run, run.plan.profile) for run in runs if run.plan.profile is not None]
    if not known:
        return None
    if all(profile == known[0][1] for _, profile in known):
        return [_layers("", [run for run, _ in known], known[0][1])]
    return [_layers(run.name, [run], profile) for run, profile in known]


def _layers(name: str, runs: Sequence[Run], profile: Profile) -> Layers:
    costs = profile.at(runs[0].plan.micro_batches).layers
    largest = max(cost.seconds for cost in costs)
    width = 100 / len(costs)
    drawn = []
    for at, (layer, cost) in enumerate(zip(profile.layers, costs, strict=True)):
        times = [cost.forward.seconds, cost.backward_input.seconds, cost.backward_weight.seconds]
        top, parts = 100.0, []
        for look, seconds in zip(_LOOKS, times, strict=True):
            height = 100 * seconds / largest if largest else 0.0
            top -= height
            if height:
                parts.append((look, top, height))
        forward, inputs, weights = map(format_seconds, times)
        tip = (
            f"{layer.name}\nforward {forward}, backward for inputs {inputs}, for weights {weights}\n"
            f"saves {format_bytes(cost.saved_bytes)}, {format_bytes(layer.parameter_bytes)} of parameters"
        )
        drawn.append(Bar(at * width, parts, tip))
    return Layers(
        name,
        format_seconds(largest),
        width,
        drawn,
        [(run.prefix, _bands(run.plan)) for run in runs],
        _table(runs, profile),
    )


def _bands(plan: Plan) -> list[Band]:
    step = 100 / sum(len(stage.layers) for stage in plan.stages)
    bands, left = [], 0.0
    for number, stage in enumerate(plan.stages):
        width = len(stage.layers) * step
        tip = f"stage {number} on {stage.device}: {counted(len(stage.layers), 'layer')}"
        bands.append(Band(left, width, str(number) if width > 2 else "", tip))
        left += width
    return bands


def _table(runs: Sequence[Run], profile: Profile) -> FittingTable:
    """Return the table of layers with the stage of each in each plan, without the spreads of the times."""
    table = layer_table(profile, runs[0].plan.micro_batches)
    blank = [""] * (len(table.columns[0].cells) - len(profile.layers))
    stages = []
    for run in runs:
        numbers = [str(number) for number, stage in enumerate(run.plan.stages) for _ in stage.layers]
        stages.append(Column(f"stage\n{run.name}" if len(runs) > 1 else "stage", [*numbers, *blank]))
    first, *others = (column for column in table.columns if column.header != "±")
    notes = [f"{note.partition('; ±')[0].removesuffix('.')}." for note in table.notes]
    return replace(table, columns=[first, *stages, *others], notes=notes)
