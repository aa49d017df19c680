"""Tables of a profile: costs per layer, and per micro-batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..profiling import Costs, LayerCost, Profile, Timing
from ..units import counted
from .folding import fold
from .quantity import NONE, TimeUnit
from .table import Column, FittingTable, bars, percents, sizes, times

_MOST_SHAPES = 2  # listed of what a layer passes on


class _Row(NamedTuple):
    name: str
    kind: str
    shape: str
    parameters: int | None  # bytes
    cost: LayerCost


def layer_table(profile: Profile, micro_batches: int | None = None, *, folded: bool = False) -> FittingTable:
    """Make a table with one row per layer, the loss, and totals.

    Args:
        profile: measured costs.
        micro_batches: which of the profiled sizes; by default the first, with the largest micro-batches.
        folded: show four or more blocks that are alike in kinds and parameters as one row, with their summed times.

    Raises:
        ValueError: that number of micro-batches was not profiled.
    """
    costs = profile.costs[0] if micro_batches is None else profile.at(micro_batches)
    layers = _layers(profile, costs)
    if folded:
        layers = _folded(layers)
    loss = [_Row("loss", "", "", None, costs.loss)] if costs.loss.seconds else []
    rows = [*layers, *loss]
    seconds = [row.cost.seconds for row in rows]
    unit = TimeUnit.for_all(seconds)
    saved_bytes = sum(piece.bytes for piece in costs.saved)

    def part(header: str, name: str) -> Column:
        timings: list[Timing] = [getattr(row.cost, name) for row in rows]
        each = [timing.seconds for timing in timings]
        return times(header, [*each, sum(each)], unit)

    def memory(header: str, name: str, total: int | None, rank: int) -> Column:
        return sizes(
            header, [*(getattr(row.cost, name) for row in layers), *(None for _ in loss), total], rank
        )

    spreads = [
        sum(timing.spread for timing in (row.cost.forward, row.cost.backward_input, row.cost.backward_weight))
        for row in rows
    ]
    spread = percents("±", [*map(_ratio, spreads, seconds), None], 6, name="spread", style="dim")
    own_parameters = sum(layer.parameter_bytes for layer in profile.layers if not layer.shares_with)
    columns = [
        Column("layer", [*(row.name for row in rows), "total"], text=True),
        Column("kind", [*(row.kind for row in rows), ""], text=True),
        Column("output", [*(row.shape for row in rows), ""], rank=4, name="output shape", text=True),
        part("forward", "forward"),
        part("backward\ninput", "backward_input"),
        part("backward\nweight", "backward_weight"),
        *([spread] if profile.roofline is None else []),
        percents("share", [*(_ratio(each, sum(seconds)) for each in seconds), None]),
        bars([*(_ratio(each, max(seconds)) for each in seconds), None], rank=3),
        sizes("params", [*(row.parameters for row in rows), own_parameters], 2),
        memory("saved for\nbackward", "saved_bytes", saved_bytes, rank=2),
        memory("output\nbytes", "output_bytes", None, rank=5),
        memory("workspace", "workspace_bytes", max(cost.workspace_bytes for cost in costs.layers), rank=5),
    ]
    notes = [_origin(profile, costs)]
    if sum(cost.saved_bytes for cost in costs.layers) != saved_bytes:
        notes.append("What several layers save is in the row of each of them, and once in the total.")
    if len(layers) < len(profile.layers):
        notes.append("Rows of blocks that are alike have their sums; --json has each layer.")
    estimated = "" if profile.roofline is None else "estimated "
    title = f"Layers of {profile.model}: {estimated}forward and backward of one micro-batch of"
    return FittingTable(f"{title} {counted(costs.samples, 'sample')}", columns, totals=1, notes=notes)


def size_table(profile: Profile) -> FittingTable:
    """Make a table of the whole model's costs on one device, one row per profiled micro-batch size."""
    each = [sum(cost.seconds for cost in (*costs.layers, costs.loss)) for costs in profile.costs]
    whole = [seconds * costs.micro_batches for seconds, costs in zip(each, profile.costs, strict=True)]
    repeats = Column("repeats", [str(costs.repeats) for costs in profile.costs], rank=1)
    return FittingTable(
        f"Sizes profiled: a mini-batch of {counted(profile.batch, 'sample')}, on one device",
        [
            Column("micro-batches", [str(costs.micro_batches) for costs in profile.costs]),
            Column("samples\nin each", [str(costs.samples) for costs in profile.costs]),
            times("micro-batch", each, TimeUnit.for_all(each)),
            times("mini-batch", whole, TimeUnit.for_all(whole)),
            sizes(
                "saved for\nbackward", [sum(value.bytes for value in costs.saved) for costs in profile.costs]
            ),
            *([] if profile.roofline else [repeats]),
        ],
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _origin(profile: Profile, costs: Costs) -> str:
    """Where the times are from."""
    if profile.roofline is not None:
        return f"Times are estimates for {profile.roofline}; nothing was measured. Bytes are counted."
    threads = f", {counted(profile.threads, 'thread')}" if profile.threads else ""
    return (
        f"Mean of {costs.repeats} repeats on {profile.device}{threads}, torch {profile.torch_version}; "
        "± is half the distance between the quartiles."
    )


def _layers(profile: Profile, costs: Costs) -> list[_Row]:
    return [
        _Row(layer.name, layer.kind, shape, layer.parameter_bytes, cost)
        for layer, shape, cost in zip(profile.layers, _shapes(profile, costs), costs.layers, strict=True)
    ]


def _folded(rows: Sequence[_Row]) -> list[_Row]:
    """One row for each four or more blocks that are alike; the others as they are."""
    folded: list[_Row] = []
    for each in fold([row.name for row in rows], [(row.kind, row.parameters) for row in rows]):
        run = rows[each.first : each.first + each.layers]
        folded += [_together(each.label, run)] if each.layers > 1 else run
    return folded


def _together(name: str, run: Sequence[_Row]) -> _Row:
    costs = [row.cost for row in run]

    def added(part: str) -> Timing:
        timings: list[Timing] = [getattr(cost, part) for cost in costs]
        return Timing(
            seconds=sum(timing.seconds for timing in timings), spread=sum(timing.spread for timing in timings)
        )

    cost = LayerCost(
        forward=added("forward"),
        backward_input=added("backward_input"),
        backward_weight=added("backward_weight"),
        saved_bytes=sum(cost.saved_bytes for cost in costs),
        output_bytes=costs[-1].output_bytes,
        workspace_bytes=max(cost.workspace_bytes for cost in costs),
    )
    kinds = list(dict.fromkeys(row.kind for row in run))
    kind = ", ".join(kinds) if len(kinds) < 3 else f"{len(kinds)} kinds"
    return _Row(name, kind, run[-1].shape, sum(row.parameters or 0 for row in run), cost)


def _shapes(profile: Profile, costs: Costs) -> list[str]:
    """Shapes of the outputs at this size, two at most; the layers know those at the first one."""
    first, texts = profile.costs[0].samples, []
    for layer in profile.layers:
        shown = []
        for spec in layer.outputs[:_MOST_SHAPES]:
            extents = [costs.samples if i == 0 and n == first else n for i, n in enumerate(spec.shape)]
            shape = "×".join(map(str, extents)) or "scalar"
            shown.append(shape if spec.dtype == "float32" else f"{shape} {spec.dtype}")
        if more := len(layer.outputs) - len(shown):
            shown.append(f"{more} more")
        texts.append(", ".join(shown) or NONE)
    return texts
