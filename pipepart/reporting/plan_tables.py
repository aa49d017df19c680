"""Tables of a plan: times of its stages, memory of its devices, the alternatives, and changes that would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.console import Group
from rich.text import Text

from ..planning import Alternative, InfeasiblePlanError, Plan, StagePlan, value_ways
from ..planning.pasting import as_options
from ..planning.plans.searched_order import SEARCH
from ..planning.suggestions import suggestions_text
from .folding import span
from .quantity import NONE, TimeUnit, percent, size
from .table import Column, FittingTable, bars, lines_to_copy

# Values listed for each border, and users of each value; the others are counted.
_MOST_VALUES = 5
_MOST_USERS = 3


class _Row(NamedTuple):
    """A stage of a replica, or all its stages on one device."""

    stages: str
    replica: int
    device: str
    layers: str
    plans: list[StagePlan]

    def sum(self, part: str) -> float:
        """Add up a figure of the stages."""
        return sum(getattr(plan, part) for plan in self.plans)


def stage_table(plan: Plan) -> FittingTable:
    """Make a table with one row per stage and, if devices have several stages, one per device below."""
    stages, count = plan.all_stages, len(plan.stages)
    known = (
        {info.name: (info.kind, info.parameter_bytes) for info in plan.profile.layers} if plan.profile else {}
    )
    spans = [span(stage.layers, [known.get(name, "") for name in stage.layers]) for stage in plan.stages]
    single = [
        _Row(str(number % count), number // count, stage.device, spans[number % count], [stage])
        for number, stage in enumerate(stages)
    ]
    loaded = [
        _Row(stage_numbers(numbers, count), replica, device, "", [stages[number] for number in numbers])
        for (replica, device), numbers in loaded_stages(plan).items()
    ]
    totals = len(loaded) if len(loaded) < len(single) else 0
    rows = single + loaded if totals else single
    blank = [""] * len(single) if totals else []
    loads = [row.sum("load_seconds") for row in loaded]
    unit = TimeUnit.for_all(loads)
    shares = [load / max(loads) if any(loads) else 0.0 for load in loads]
    recompute = any(stage.recompute != "never" for stage in stages)

    def times(header: str, part: str, rank: int = 0) -> Column:
        return Column(f"{header}\n{unit.name}", [unit.text(row.sum(part)) for row in rows], rank)

    return FittingTable(
        "Stages: time for one micro-batch",
        [
            Column("stage", [row.stages for row in rows]),
            *([Column("replica", [str(row.replica) for row in rows])] if plan.replicas > 1 else []),
            Column("device", [row.device for row in rows], text=True),
            *([_hosts(plan, [row.device for row in rows])] if plan.cluster.network else []),
            Column("layers", [row.layers for row in rows], text=True),
            Column(
                "count",
                [str(sum(len(stage.layers) for stage in row.plans)) for row in rows],
                rank=5,
                name="layer count",
            ),
            times("forward", "forward_seconds"),
            times("backward\ninput", "backward_input_seconds", rank=2),
            times("backward\nweight", "backward_weight_seconds", rank=2),
            *([times("recompute", "recompute_seconds", rank=1)] if recompute else []),
            times("transfer", "transfer_seconds", rank=6),
            times("load", "load_seconds"),
            Column("share", [*blank, *map(percent, shares)], 3, name="share of the bottleneck"),
            bars([*([None] * len(blank)), *shares], rank=4),
        ],
        totals=totals,
        notes=[
            "Load: all of these times. Share: of the bottleneck, the largest load of any device.",
            *([_recompute_note(plan)] if recompute else []),
        ],
    )


def _hosts(plan: Plan, devices: Sequence[str]) -> Column:
    return Column("host", [plan.cluster.device(name).host for name in devices], rank=4, text=True)


def _recompute_note(plan: Plan) -> str:
    modes = {stage.recompute for stage in plan.stages} - {"never"}
    which = "all but the last micro-batch" if modes == {"except-last"} else "every micro-batch"
    if len(modes) > 1:
        which = "the micro-batches (in some stages, all but the last)"
    return f"Recompute: the forward runs again right before the backward of {which}. {NONE}: not recomputed."


def memory_table(plan: Plan) -> FittingTable:
    """Make a table with one row per device: its peak memory and its limit."""
    owned, needs = owned_stages(plan), plan.device_bytes()
    every = plan.all_stages
    stages = [[every[number] for number in numbers] for numbers in owned.values()]
    static = [sum(stage.static_bytes for stage in own) for own in stages]
    transient = [max(stage.transient_bytes for stage in own) for own in stages]
    kept = [
        needs[device] - fixed - most for device, fixed, most in zip(owned, static, transient, strict=True)
    ]
    recompute = any(stage.mode != "never" for stage in plan.stages)
    deferred = any(stage.deferred_weight_grads and stage.deferred_bytes for stage in plan.stages)
    single = all(len(own) == 1 for own in stages)
    # A single product is a number; a sum may fold.
    plain = single and not recompute and not deferred
    terms = [" + ".join(filter(None, map(_terms, own))) or NONE for own in stages]
    columns = [
        Column(
            "stage" if single else "stages",
            [stage_numbers(numbers, len(plan.stages)) for numbers in owned.values()],
        ),
        Column("device", list(owned), text=True),
        Column("parameters,\noptimizer", list(map(size, static))),
        Column("in flight\n× stash", terms, rank=1 if plain else 3, text=not plain),
        *([] if plain else [Column("kept for\nbackward", list(map(size, kept)), rank=1)]),
        Column("workspace", list(map(size, transient)), rank=2),
        Column("total", [size(needs[device]) for device in owned], style="bold"),
    ]
    limits = [plan.cluster.device(device).memory_bytes for device in owned]
    if any(limits):
        parts = [
            needs[device] / limit if limit else None for device, limit in zip(owned, limits, strict=True)
        ]
        columns += [
            Column("limit", [size(limit) if limit else "none" for limit in limits]),
            Column("used", [NONE if part is None else percent(part) for part in parts]),
            bars(parts, rank=4),
        ]
    only_input = "; only the stage's input if the stage recomputes or offloads" if recompute else ""
    notes = [
        f"Stash: kept per micro-batch in flight for its backward{only_input}. "
        "Workspace: what the action at the peak needs besides, and messages that wait."
    ]
    if deferred:
        notes.append(
            "Between the backward for inputs and the backward for weights, what the latter needs replaces the stash."
        )
    if plan.replicas > 1:
        notes.append("Each replica has its own parameters and gradients; only the first has optimizer state.")
    if not single:
        notes.append("Kept: the peak of all stages of the device together.")
    if free := sorted({plan.cluster.device(device).headroom for device in owned} - {0.0}):
        notes.append(f"Limit: without {' or '.join(map(percent, free))} of the memory, the headroom.")
    return FittingTable("Devices: memory", columns, notes=notes)


def borders_table(plan: Plan) -> FittingTable | None:
    """Make a table of the live values that cross each border, the largest first; None if the model is a chain."""
    if not (ways := value_ways(plan)):
        return None
    rows: list[tuple[str, str, int, str, str]] = []
    for border in range(len(plan.stages) - 1):
        crossing = sorted((way for way in ways if way.crosses(border)), key=lambda way: -way.bytes)
        shown = crossing if len(crossing) <= _MOST_VALUES + 1 else crossing[:_MOST_VALUES]
        label = f"{border} | {border + 1}"
        for way in shown:
            value = f"output of {way.maker}" if way.maker else "argument"
            users = _listed(way.users_behind(border))
            rows.append((label, value, way.bytes, users, " → ".join(map(str, way.stages))))
            label = ""
        if rest := crossing[len(shown) :]:
            rows.append(("", f"{len(rest)} more", sum(way.bytes for way in rest), "", ""))
    borders, values, sizes, used_by, stages = zip(*rows, strict=True)
    return FittingTable(
        "Live values that cross the borders of stages",
        [
            Column("border", borders, text=True),
            Column("value", values, text=True),
            Column("bytes", list(map(size, sizes))),
            Column("used behind\nthe border by", used_by, rank=1, text=True),
            Column("stages that have it", stages, text=True),
        ],
        notes=[
            "For each micro-batch, from one of these stages straight to the next. Gradients return the same way."
        ],
    )


def _listed(names: Sequence[str]) -> str:
    """Format names as in "a, b, c and 4 more"."""
    shown = names if len(names) <= _MOST_USERS + 1 else names[:_MOST_USERS]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return ", ".join(shown) + more


def _terms(stage: StagePlan) -> str:
    """Format the counts of full stashes, input-only stashes and deferred weight gradients."""
    kept = [
        (stage.full_stashes, stage.stash_bytes),
        (stage.input_only, stage.boundary_bytes),
        (stage.deferred_weight_grads, stage.deferred_bytes),
    ]
    return " + ".join(f"{count} × {size(each)}" for count, each in kept if count and each)


def alternatives_table(plan: Plan, compact: bool = False) -> FittingTable:
    """Make a table of the plan and its alternatives, fastest first, with the reason why each was not chosen.

    Args:
        plan: with a prediction.
        compact: show only the best of each schedule that fits.
    """
    shown: list[Alternative] = list(plan.alternatives)
    if compact:
        shown = [other for other in shown if other.step_seconds is not None]
        best: dict[str, Alternative] = {}
        for other in shown:  # the fastest first
            best.setdefault(other.schedule, other)
        shown = list(best.values())
    both, numbers = [plan, *shown], ["", *map(str, range(1, len(shown) + 1))]
    step = [plan.predicted.step_seconds, *(other.step_seconds for other in shown)]
    memory = [max(plan.predicted.memory_bytes), *(other.memory_bytes for other in shown)]
    unit = TimeUnit.for_all(seconds for seconds in step if seconds is not None)
    hidden = len(plan.alternatives) - len(shown)
    replicas = [each.replicas for each in both]
    return FittingTable(
        "Alternatives",
        [
            *([] if compact else [Column("", numbers)]),
            Column("schedule", [each.schedule for each in both], text=True),
            Column("micro-\nbatches", [str(each.micro_batches) for each in both]),
            Column("stages", [str(len(plan.stages)), *(str(other.stages) for other in shown)], rank=2),
            Column(
                "chunks", [NONE if each.schedule == SEARCH else str(each.chunks) for each in both], rank=3
            ),
            *([Column("replicas", list(map(str, replicas)))] if max(replicas) > 1 else []),
            Column(
                f"step\n{unit.name}", [NONE if seconds is None else unit.text(seconds) for seconds in step]
            ),
            Column("memory", list(map(size, memory)), rank=1),
            Column("why it lost", ["chosen", *(other.why for other in shown)], text=True),
        ],
        notes=[f"And {hidden} more: `pipepart explain` shows them."] if hidden else [],
    )


def alternatives_options(plan: Plan) -> Group:
    """List the options of ``pipepart plan`` that give each alternative, numbered as in the table, one line each."""
    lines = [
        f"{number}. {as_options(replace(plan.constraints, **other.keywords).given)}"
        for number, other in enumerate(plan.alternatives, 1)
        if other.step_seconds is not None
    ]
    title = "Options of `pipepart plan` for each of them, beside the model and the devices"
    return Group(Text(title, style="bold"), lines_to_copy(lines))


def infeasible_report(error: InfeasiblePlanError) -> Group:
    """Show why a model does not fit, and options of the command line that would make it fit, one line each."""
    head, *lines = suggestions_text(error.suggestions, command_line=True).splitlines()
    return Group(
        Text(f"{error.reason[:1].upper()}{error.reason[1:]}."), Text(), Text(head), lines_to_copy(lines)
    )


def owned_stages(plan: Plan) -> dict[str, list[int]]:
    """Map each device in use to its stages, in pipeline order, the first replica's first."""
    owned: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.all_stages):
        owned.setdefault(stage.device, []).append(number)
    return owned


def loaded_stages(plan: Plan) -> dict[tuple[int, str], list[int]]:
    """Map (replica, device) to the stages that a micro-batch of that replica passes there."""
    loaded: dict[tuple[int, str], list[int]] = {}
    for number, stage in enumerate(plan.all_stages):
        loaded.setdefault((number // len(plan.stages), stage.device), []).append(number)
    return loaded


def stage_numbers(numbers: Sequence[int], stages: int | None = None) -> str:
    """Format stage numbers as in "0, 2"; with ``stages`` per replica, number within the replica."""
    return ", ".join(str(number % stages if stages else number) for number in numbers)
