"""Tables of a plan: times of its stages, memory of its devices, the alternatives, and changes that would fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from ..planning import Alternative, InfeasiblePlanError, Plan, value_ways
from ..planning.plans.searched_order import SEARCH
from ..planning.suggestions import suggestions_text
from .folding import span
from .quantity import NONE, TimeUnit, percent
from .table import Column, FittingTable, bars, lines_to_copy, percents, sizes, times

# Values listed for each border, and users of each value; the others are counted.
_MOST_VALUES = 5
_MOST_USERS = 3


def stage_table(plan: Plan) -> FittingTable:
    """Make a table with one row per stage: its layers, and its times for one micro-batch."""
    stages, count = plan.all_stages, len(plan.stages)
    known = (
        {info.name: (info.kind, info.parameter_bytes) for info in plan.profile.layers} if plan.profile else {}
    )
    spans = [span(stage.layers, [known.get(name, "") for name in stage.layers]) for stage in plan.stages]
    loads = [stage.load_seconds for stage in stages]
    unit = TimeUnit.for_all(loads)
    shares = [load / (max(loads) or 1.0) for load in loads]
    recompute = any(stage.recompute != "never" for stage in stages)
    network = plan.cluster.network

    def part(header: str, name: str, rank: int = 0) -> Column:
        return times(header, [getattr(stage, name) for stage in stages], unit, rank)

    return FittingTable(
        "Stages: time for one micro-batch",
        [
            Column("stage", [str(number % count) for number in range(len(stages))]),
            *(
                [Column("replica", [str(number // count) for number in range(len(stages))])]
                if plan.replicas > 1
                else []
            ),
            Column("device", [stage.device for stage in stages], text=True),
            *(
                [Column("host", [plan.cluster.device(stage.device).host for stage in stages], 4, text=True)]
                if network
                else []
            ),
            Column("layers", [spans[number % count] for number in range(len(stages))], text=True),
            part("forward", "forward_seconds"),
            part("backward\ninput", "backward_input_seconds", 2),
            part("backward\nweight", "backward_weight_seconds", 2),
            *([part("recompute", "recompute_seconds", 1)] if recompute else []),
            part("transfer", "transfer_seconds", 6),
            part("load", "load_seconds"),
            bars(shares, rank=4),
        ],
        notes=[
            "Load: all of these times."
            + (" Recompute: the forward runs again before the backward." if recompute else "")
        ],
    )


def memory_table(plan: Plan) -> FittingTable:
    """Make a table with one row per device: its stages, its peak memory and its limit."""
    owned, needs, stages = owned_stages(plan), plan.device_bytes(), plan.all_stages
    rows = [[stages[number] for number in numbers] for numbers in owned.values()]
    total = [needs[device] for device in owned]
    static = [sum(stage.static_bytes for stage in row) for row in rows]
    # An asynchronous stage may hold no gradients at its peak.
    activations = [max(need - fixed, 0) for need, fixed in zip(total, static, strict=True)]
    limits = [plan.cluster.device(device).memory_bytes for device in owned]
    used = [need / limit if limit else None for need, limit in zip(total, limits, strict=True)]
    several = any(len(row) > 1 for row in rows)
    loads = [sum(stage.load_seconds for stage in row) for row in rows]
    notes = [
        "Activations: at the peak, what micro-batches in flight keep for their backwards, workspace, waiting messages."
    ]
    if plan.replicas > 1:
        notes.append("Each replica has its own parameters and gradients; only the first has optimizer state.")
    if free := sorted({plan.cluster.device(device).headroom for device in owned} - {0.0}):
        notes.append(f"Limit: without {' or '.join(map(percent, free))} of the memory, the headroom.")
    return FittingTable(
        "Devices: memory" if not several else "Devices: time of one micro-batch, memory",
        [
            Column("device", list(owned), text=True),
            Column("stages", [stage_numbers(numbers, len(plan.stages)) for numbers in owned.values()]),
            *([times("load", loads, TimeUnit.for_all(loads))] if several else []),
            sizes("parameters,\noptimizer", static),
            Column("in\nflight", [str(max(stage.in_flight for stage in row)) for row in rows], rank=3),
            sizes("activations", activations, 1),
            sizes("total", total, style="bold"),
            *([sizes("limit", limits), percents("used", used), bars(used, rank=4)] if any(limits) else []),
        ],
        notes=notes,
    )


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
            users = few(way.users_behind(border), _MOST_USERS)
            rows.append((label, value, way.bytes, users, " → ".join(map(str, way.stages))))
            label = ""
        if rest := crossing[len(shown) :]:
            rows.append(("", f"{len(rest)} more", sum(way.bytes for way in rest), "", ""))
    borders, values, counts, used_by, stages = zip(*rows, strict=True)
    return FittingTable(
        "Live values that cross the borders of stages",
        [
            Column("border", borders, text=True),
            Column("value", values, text=True),
            sizes("bytes", counts),
            Column("used behind\nthe border by", used_by, rank=1, text=True),
            Column("stages that have it", stages, text=True),
        ],
        notes=[
            "For each micro-batch, from one of these stages straight to the next. Gradients return the same way."
        ],
    )


def alternatives_table(plan: Plan, compact: bool = False) -> FittingTable:
    """Make a table of the plan and its alternatives, fastest first, with the reason why each was not chosen.

    Args:
        plan: with a prediction.
        compact: show only the best of each schedule that fits.
    """
    shown: list[Alternative] = list(plan.alternatives)
    if compact:
        best: dict[str, Alternative] = {}
        for other in shown:  # the fastest first
            if other.step_seconds is not None:
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
            times("step", step, unit),
            sizes("memory", memory, 1),
            Column("why it lost", ["chosen", *(other.why for other in shown)], text=True),
        ],
        notes=[f"And {hidden} more: `pipepart explain` shows them."] if hidden else [],
    )


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


def stage_numbers(numbers: Sequence[int], stages: int | None = None) -> str:
    """Format stage numbers as in "0, 2"; with ``stages`` per replica, number within the replica."""
    return ", ".join(str(number % stages if stages else number) for number in numbers)


def few(names: Sequence[str], most: int) -> str:
    """Format names as in "a, b, c and 4 more"; one more than ``most`` is shown, too."""
    shown = names if len(names) <= most + 1 else names[:most]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return ", ".join(shown) + more
