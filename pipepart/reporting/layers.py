"""Tables of a profile: costs per layer, and per micro-batch size."""

from __future__ import annotations

from ..profiling import Costs, LayerCost, Profile, Timing
from ..units import counted
from .quantity import NONE, TimeUnit, percent, size
from .table import Column, FittingTable, bars


def layer_table(profile: Profile, micro_batches: int | None = None) -> FittingTable:
    """Make a table with one row per layer, the loss, and totals.

    Args:
        profile: measured costs.
        micro_batches: which of the profiled sizes; by default the first, with the largest micro-batches.

    Raises:
        ValueError: that number of micro-batches was not profiled.
    """
    costs = profile.costs[0] if micro_batches is None else profile.at(micro_batches)
    layers, rows = profile.layers, _rows(costs)
    loss = ["loss"] * (len(rows) - len(layers))
    blank = [""] * len(loss)
    seconds = [row.seconds for row in rows]
    unit = TimeUnit.for_all(seconds)
    saved_bytes = sum(piece.bytes for piece in costs.saved)

    def times(header: str, part: str) -> list[Column]:
        timings: list[Timing] = [getattr(row, part) for row in rows]
        total = sum(timing.seconds for timing in timings)
        spreads = [f"{timing.spread / timing.seconds:.0%}" if timing.seconds else "" for timing in timings]
        shown = [Column(header, [*(unit.text(timing.seconds) for timing in timings), unit.text(total)])]
        if profile.roofline is None:
            name = "spread" if part == "forward" else ""
            shown.append(Column("±", [*spreads, ""], rank=6, name=name, style="dim"))
        return shown

    def memory(header: str, part: str, total: int | None, rank: int) -> Column:
        cells = [size(getattr(cost, part)) for cost in costs.layers]
        return Column(header, [*cells, *blank, "" if total is None else size(total)], rank)

    parameters = [size(layer.parameter_bytes) for layer in layers]
    own_parameters = sum(layer.parameter_bytes for layer in layers if not layer.shares_with)
    columns = [
        Column("layer", [*(layer.name for layer in layers), *loss, "total"], text=True),
        Column("kind", [*(layer.kind for layer in layers), *blank, ""], text=True),
        Column("output", [*_shapes(profile, costs), *blank, ""], rank=4, name="output shape", text=True),
        *times(f"forward\n{unit.name}", "forward"),
        *times(f"backward\ninput {unit.name}", "backward_input"),
        *times(f"backward\nweight {unit.name}", "backward_weight"),
        Column("share", [*(percent(each / (sum(seconds) or 1.0)) for each in seconds), ""]),
        bars([*(each / (max(seconds) or 1.0) for each in seconds), None], rank=3),
        Column("params", [*parameters, *blank, size(own_parameters)], rank=2),
        memory("saved for\nbackward", "saved_bytes", saved_bytes, rank=2),
        memory("output\nbytes", "output_bytes", None, rank=5),
        memory("workspace", "workspace_bytes", max(cost.workspace_bytes for cost in costs.layers), rank=5),
    ]
    notes = [_origin(profile, costs)]
    if sum(cost.saved_bytes for cost in costs.layers) != saved_bytes:
        notes.append("What several layers save is in the row of each of them, and once in the total.")
    estimated = "" if profile.roofline is None else "estimated "
    title = f"Layers of {profile.model}: {estimated}forward and backward of one micro-batch of"
    return FittingTable(f"{title} {counted(costs.samples, 'sample')}", columns, totals=1, notes=notes)


def size_table(profile: Profile) -> FittingTable:
    """Make a table of the whole model's costs on one device, one row per profiled micro-batch size."""
    each = [sum(row.seconds for row in _rows(costs)) for costs in profile.costs]
    whole = [seconds * costs.micro_batches for seconds, costs in zip(each, profile.costs, strict=True)]
    unit, whole_unit = TimeUnit.for_all(each), TimeUnit.for_all(whole)
    saved = [size(sum(piece.bytes for piece in costs.saved)) for costs in profile.costs]
    repeats = Column("repeats", [str(costs.repeats) for costs in profile.costs], rank=1)
    return FittingTable(
        f"Sizes profiled: a mini-batch of {counted(profile.batch, 'sample')}, on one device",
        [
            Column("micro-batches", [str(costs.micro_batches) for costs in profile.costs]),
            Column("samples\nin each", [str(costs.samples) for costs in profile.costs]),
            Column(f"micro-batch\n{unit.name}", list(map(unit.text, each))),
            Column(f"mini-batch\n{whole_unit.name}", list(map(whole_unit.text, whole))),
            Column("saved for\nbackward", saved),
            *([] if profile.roofline else [repeats]),
        ],
    )


def _origin(profile: Profile, costs: Costs) -> str:
    """Where the times are from."""
    if profile.roofline is not None:
        return f"Times are estimates for {profile.roofline}; nothing was measured. Bytes are counted."
    threads = f", {counted(profile.threads, 'thread')}" if profile.threads else ""
    return (
        f"Median of {costs.repeats} repeats on {profile.device}{threads}, torch {profile.torch_version}; "
        "± is half the distance between the quartiles."
    )


def _rows(costs: Costs) -> list[LayerCost]:
    """Return the costs of the layers, and of the loss if it takes time."""
    return [*costs.layers, *([costs.loss] if costs.loss.seconds else [])]


def _shapes(profile: Profile, costs: Costs) -> list[str]:
    """Shapes of the outputs at this size; the layers know those at the first one."""
    first, texts = profile.costs[0].samples, []
    for layer in profile.layers:
        shown = []
        for spec in layer.outputs:
            extents = [costs.samples if i == 0 and n == first else n for i, n in enumerate(spec.shape)]
            shape = "×".join(map(str, extents)) or "scalar"
            shown.append(shape if spec.dtype == "float32" else f"{shape} {spec.dtype}")
        texts.append(", ".join(shown) or NONE)
    return texts
