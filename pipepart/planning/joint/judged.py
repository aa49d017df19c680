"""Judged: a layout with the order of its operations, and the seconds that the step then takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from schedules import StageCosts
from schedules.searching.dispatching import Row, Work, dispatch, play_rows, steady_keys
from schedules.searching.local_search import improve
from schedules.searching.objectives import OBJECTIVES
from schedules.searching.problem import Problem

from ..costs.layer_ranges import TOLERANCE
from .layout import Layout
from .pricing import Pricing


@dataclass(frozen=True, slots=True)
class Judged:
    """A layout with an order.

    Attributes:
        layout: the cut and the placement.
        work: its operations.
        rows: the order of each device.
        seconds: of the step.
        score: what annealing minimises; see :attr:`schedules.searching.dispatching.Dispatched.score`.
        idle: of each device, seconds in which it waits before its end.
    """

    layout: Layout
    work: Work
    rows: Sequence[Row]
    seconds: float
    score: float
    idle: Sequence[float]


def judge(layout: Layout, pricing: Pricing, limit: float = math.inf) -> Judged | None:
    """Dispatch a layout by its rule; None if it does not fit the memory, or its score is above the limit."""
    work = pricing.work(layout)
    if work is None:
        return None
    rule = layout.rule
    found = dispatch(work, steady_keys(work, rule.spread, rule.spread_back), rule.weight_gap, limit)
    if found is None:
        return None
    m, ends = pricing.micro_batches, found.ends
    idle = [end - m * load for end, load in zip(ends, pricing.loads(layout), strict=True)]
    return Judged(layout, work, found.rows, found.makespan, found.score, idle)


def reorder(found: Judged, plays: int, goal: float, random: Random) -> Judged:
    """Anneal the order of a layout, by moves of single operations of the critical path.

    Args:
        found: to be improved.
        plays: how many moves.
        goal: seconds to stop at.
        random: of the moves.
    """
    used = [device for device, row in enumerate(found.rows) if row]
    problem = _problem(found.work, used)
    given = [found.rows[device] for device in used]
    rows = improve(problem, given, OBJECTIVES["makespan"], plays, random, goal)
    placed = dict(zip(used, rows, strict=True))
    moved = [placed.get(device, []) for device in range(found.work.devices)]
    ends = play_rows(found.work, moved)
    return (
        found if ends is None or max(ends) >= found.seconds else replace(found, seconds=max(ends), rows=moved)
    )


def with_fewer_stages(found: Judged, pricing: Pricing) -> Judged:
    """Join neighbouring stages of one device wherever the step gets no longer: each action costs a little in a run."""
    at = 0
    while at + 1 < found.layout.stages:
        joined = _joined(found, at, pricing)
        found, at = (joined, at) if joined is not None else (found, at + 1)
    return found


def _joined(found: Judged, at: int, pricing: Pricing) -> Judged | None:
    """Stage ``at`` and the next one as a single stage, each pair of operations at one place; None if that is slower."""
    old, m = found.layout, pricing.micro_batches
    if any(values[at] != values[at + 1] for values in (old.devices, old.fused, old.modes)):
        return None
    layout = old.joined(at, at)
    work = pricing.work(layout)
    if work is None:
        return None

    def renumbered(operation: int) -> int:
        kind, stage, k = operation // (m * old.stages), operation // m % old.stages, operation % m
        # Of two F's or I's the first stays, of two W's that of the stage whose I is the last.
        if stage == (at if kind == 1 else at + 1):
            return -1
        return (kind * layout.stages + stage - (stage > at)) * m + k

    rows = [[new for new in map(renumbered, row) if new >= 0] for row in found.rows]
    ends = play_rows(work, rows)
    if ends is None or max(ends) > found.seconds * (1 + TOLERANCE):
        return None
    if work.room is not None:
        used = [device for device, row in enumerate(rows) if row]
        if not _problem(work, used).fits([rows[device] for device in used]):
            return None
    return replace(found, layout=layout, work=work, rows=rows, seconds=max(ends))


def _problem(work: Work, used: Sequence[int]) -> Problem:
    """The operations as local search takes them: a recompute is a part of its backward, and links are always free."""
    m, stages, place = work.micro_batches, work.stages, {device: at for at, device in enumerate(used)}
    last = [(kind * stages + stage) * m for kind in range(3) for stage in range(stages)]
    seconds = [
        work.seconds[at] + (work.before[at] if work.before and at < 2 * stages * m else 0.0) for at in last
    ]
    room = work.room
    costs = StageCosts(
        seconds[:stages],
        seconds[stages : 2 * stages],
        seconds[2 * stages :],
        bandwidth=1.0,
        message_bytes=[*work.delay_forward[1:], 0.0],
        stash_bytes=[max(room.stash[at * m], room.stash[at * m + m - 1]) for at in range(stages)]
        if room
        else (),
        weight_stash_bytes=[room.deferred[at * m] for at in range(stages)] if room else (),
    )
    limits = [room.limit[device] - room.most[device] if room else math.inf for device in used]
    return Problem(costs, len(used), m, tuple(place[device] for device in work.device_of), tuple(limits))
