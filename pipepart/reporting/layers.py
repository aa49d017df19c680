"""Tables of a profile: costs per layer, and per micro-batch size."""

from __future__ import annotations

from ..profiling import Costs, LayerCost, Profile, Timing
from .kit.quantity import NONE, TimeUnit, bar, percent, size, spread
from .kit.table import Column, FittingTable


def layer_table(profile: Profile, micro_batches: int | None = None) -> FittingTable:
    """Make a table with one row per layer, the loss, and totals.

    Args:
        profile: measured costs.
        micro_batches: which of the profiled sizes; by default the first, with the largest micro-batches.

    Raises:
        ValueError: that number of micro-batches was not profiled.
    """
    costs = profile.costs[0] if micro_batches is None else profile.at(micro_batches)
    rows = [*costs.layers, *([costs.loss] if costs.loss.seconds else [])]
    more = [""] * (len(rows) - len(costs.layers))
    total = sum(row.seconds for row in rows)
    unit = TimeUnit.for_all(row.seconds for row in rows)
    largest = max(row.seconds for row in rows)

    def times(header: str, part: str, rank: int) -> list[Column]:
        timings: list[Timing] = [getattr(row, part) for row in rows]
        summed = sum(timing.seconds for timing in timings)
        return [
            Column(header, [*(unit.text(timing.seconds) for timing in timings), unit.text(summed)], rank),
            Column(
                "±",
                [*map(spread, timings), ""],
                rank=6,
                name="spread" if part == "forward" else "",
                style="dim",
            ),
        ]

    columns = [
        Column(
            "layer",
            [*(layer.name for layer in profile.layers), *(["loss"] if more else []), "total"],
            text=True,
        ),
        Column("kind", [*(layer.kind for layer in profile.layers), *more, ""], text=True),
        Column("output", [*_shapes(profile, costs), *more, ""], rank=4, name="output shape", text=True),
        *times(f"forward\n{unit.name}", "forward", 0),
        *times(f"backward\ninput {unit.name}", "backward_input", 0),
        *times(f"backward\nweight {unit.name}", "backward_weight", 0),
        Column("share", [*(percent(row.seconds / total if total else 0) for row in rows), ""]),
        Column(
            "",
            [*(bar(row.seconds / largest if largest else 0) for row in rows), ""],
            rank=3,
            text=True,
            style="cyan",
        ),
        Column(
            "params",
            [
                *(size(layer.parameter_bytes) for layer in profile.layers),
                *more,
                size(sum(layer.parameter_bytes for layer in profile.layers if not layer.shares_with)),
            ],
            rank=2,
        ),
        _memory(
            "saved for\nbackward", costs, "saved_bytes", sum(piece.bytes for piece in costs.saved), 2, more
        ),
        _memory("output\nbytes", costs, "output_bytes", None, 5, more),
        _memory(
            "workspace", costs, "workspace_bytes", max(cost.workspace_bytes for cost in costs.layers), 5, more
        ),
    ]
    return FittingTable(
        f"Layers of {profile.model}: forward and backward of one micro-batch of {_samples(costs.samples)}",
        columns,
        totals=1,
        notes=_notes(profile, costs),
    )


def size_table(profile: Profile) -> FittingTable:
    """Make a table of the whole model's costs on one device, one row per profiled micro-batch size."""
    totals = [_total(costs) for costs in profile.costs]
    unit = TimeUnit.for_all(totals)
    whole = TimeUnit.for_all(
        total * costs.micro_batches for total, costs in zip(totals, profile.costs, strict=True)
    )
    return FittingTable(
        f"Sizes profiled: a mini-batch of {_samples(profile.batch)}, on one device",
        [
            Column("micro-batches", [str(costs.micro_batches) for costs in profile.costs]),
            Column("samples\nin each", [str(costs.samples) for costs in profile.costs]),
            Column(f"micro-batch\n{unit.name}", [unit.text(total) for total in totals]),
            Column(
                f"mini-batch\n{whole.name}",
                [
                    whole.text(total * costs.micro_batches)
                    for total, costs in zip(totals, profile.costs, strict=True)
                ],
            ),
            Column(
                "saved for\nbackward",
                [size(sum(piece.bytes for piece in costs.saved)) for costs in profile.costs],
            ),
            Column("repeats", [str(costs.repeats) for costs in profile.costs], rank=1),
        ],
    )


def _memory(header: str, costs: Costs, part: str, total: int | None, rank: int, more: list[str]) -> Column:
    cells = [size(getattr(cost, part)) for cost in costs.layers]
    return Column(header, [*cells, *more, "" if total is None else size(total)], rank)


def _total(costs: Costs) -> float:
    everything: tuple[LayerCost, ...] = (*costs.layers, costs.loss)
    return sum(cost.seconds for cost in everything)


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


def _notes(profile: Profile, costs: Costs) -> list[str]:
    threads = f", {profile.threads} thread{'s' if profile.threads != 1 else ''}" if profile.threads else ""
    notes = [
        f"Median of {costs.repeats} repeats on {profile.device}{threads}, torch {profile.torch_version}; "
        "± is half the distance between the quartiles."
    ]
    if sum(cost.saved_bytes for cost in costs.layers) != sum(piece.bytes for piece in costs.saved):
        notes.append("What several layers save is in the row of each of them, and once in the total.")
    return notes


def _samples(count: int) -> str:
    return f"{count} sample{'s' if count != 1 else ''}"
