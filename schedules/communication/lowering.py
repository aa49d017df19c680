"""Lowers a schedule to messages, in one global order in which all ranks send, receive and reduce.

Each message stands at one point of that order, which is the moment at which its sender has made it, if every forward
takes one unit of time and every backward two. So on all ranks the messages come in the same order::

    device 0   0F0 ─┬─ 0F1 ─┬──────────────── 0B0            global order: 0F0, 0F1, 1B0
                  0SEND_F0  0SEND_F1    0RECV_B0
    device 1      1RECV_F0  1RECV_F1    1SEND_B0
                    └─ 1F0 ─┴─ 1B0 ──────┘

The earliest message that is not done is then the next one of both its ends, and what it waits for comes before it. So
even one queue of messages without buffers for each rank cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.action import COMMUNICATION, Action, Kind, ScheduleError
from ..core.dependencies import COMPUTES, Dependencies, dependencies
from ..core.message import Message
from ..core.schedule import Schedule
from ..simulation.deadlock import Waits, play_waits

Pairs = Sequence[tuple[int, int]]
Row = Sequence[Action | Message]

# Units of time. What makes a message takes some, so that a message comes after those that it depends on.
_UNITS = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2, Kind.RECOMPUTE: 1, Kind.REDUCE_GRAD: 1}


@dataclass(frozen=True)
class Lowering:
    """The actions and messages of a schedule, device by device.

    Attributes:
        schedule: that it is made of.
        rank_of: the rank of each device.
        rows: of each device its actions, and between them the messages that it sends, receives or reduces. A
            REDUCE_GRAD that other ranks take part in is a message.
        orders: of each rank its messages, in the order in which it sends, receives and reduces.
    """

    schedule: Schedule
    rank_of: Sequence[int]
    rows: Sequence[Row]
    orders: Sequence[Sequence[Message]]


def message_order(
    schedule: Schedule, skips: Pairs = (), shared: Pairs = (), rank_of: Sequence[int] = ()
) -> tuple[Message, ...]:
    """Return all messages of a step in a global order that every rank can follow without deadlock.

    Rank r takes part in those with ``r in message.ranks``. It sends those with ``message.ranks[0] == r`` and receives
    the others, except that a REDUCE_GRAD is a collective.

    If each rank issues its messages in this order, no deadlock is possible: not with one queue a rank, nor with one for
    each pair of ranks or each directed edge, even if nothing is buffered. Transports that match messages by their
    order, as NCCL does, need the order on each directed edge at least. A rank never waits before it issues: before an
    action, issue everything up to the last message that the action needs; after it, everything up to the last one that
    it makes. If a rank drives several devices, issue from one queue in this order. A message may be left out on all its
    ranks: if there are forwards only, take those of kind F.

    An action sends to the nearest stage first, and gradients of shared parameters last.

    Args:
        schedule: one that passes `check`. Sends and receives that it has are left out.
        skips: (source, target) of the messages that each micro-batch sends past stages, as stages of one copy of the
            model. Their gradients go back.
        shared: (later stage, earlier stage) between which the gradient of a shared parameter is sent for each
            micro-batch, from its user to the previous user; one pair for each parameter.
        rank_of: the rank that drives each device; left out, each device has a rank of its own. Within a rank there are
            no messages.

    Raises:
        ScheduleError: the devices wait for each other for ever, or a pair or rank is impossible.

    >>> from schedules import build
    >>> [message.end(0) for message in message_order(build("1f1b", devices=2, micro_batches=2))]
    ['0SEND_F0', '0SEND_F1', '0RECV_B0', '0RECV_B1']
    """
    return _placed(schedule, skips, shared, rank_of)[0]


def lower(schedule: Schedule, skips: Pairs = (), shared: Pairs = (), rank_of: Sequence[int] = ()) -> Lowering:
    """Return the schedule with its messages, in the order of `message_order`. Arguments as there."""
    messages, rows = _placed(schedule, skips, shared, rank_of)
    rank_of = rank_of or range(schedule.devices)
    orders: list[list[Message]] = [[] for _ in range(max(rank_of) + 1)]
    for message in messages:
        for rank in message.ranks:
            orders[rank].append(message)
    return Lowering(schedule, rank_of, rows, orders)


def without_messages(schedule: Schedule) -> Schedule:
    """Return the schedule without its sends and receives."""
    rows = tuple(
        tuple(action for action in row if action.kind not in COMMUNICATION) for row in schedule.actions
    )
    return replace(schedule, actions=rows)


def reductions(schedule: Schedule, rank_of: Sequence[int]) -> dict[int, Message]:
    """Map each stage whose gradients are summed over several ranks to the message of its REDUCE_GRAD."""
    apart = schedule.model_stages
    have = {a.stage for row in schedule.actions for a in row if a.kind is Kind.REDUCE_GRAD}
    found = {}
    for first in range(apart):
        copies = tuple(stage for stage in range(first, schedule.stages, apart) if stage in have)
        ranks = tuple(sorted({rank_of[schedule.device_of[stage]] for stage in copies}))
        if len(ranks) > 1:
            found.update(dict.fromkeys(copies, Message(Kind.REDUCE_GRAD, copies, ranks, None)))
    return found


def _placed(
    schedule: Schedule, skips: Pairs, shared: Pairs, rank_of: Sequence[int]
) -> tuple[tuple[Message, ...], list[Row]]:
    """Return all messages in their order, and the row of each device with them."""
    schedule = without_messages(schedule)
    rank_of = rank_of or range(schedule.devices)
    _check_ends(schedule, skips, shared, rank_of)
    starts, ends = _play(schedule)
    made = list(_made(schedule, _targets(schedule, skips, shared, rank_of), ends))
    sums = reductions(schedule, rank_of)
    moment: dict[Message, float] = {}
    for row, begun in zip(schedule.actions, starts, strict=True):
        for action, start in zip(row, begun, strict=True):
            if action.kind is Kind.REDUCE_GRAD and (message := sums.get(action.stage)):
                moment[message] = max(start, moment.get(message, 0.0))
    made += [(start, message) for message, start in moment.items()]
    made.sort(key=lambda one: one[0])  # stable: a sum comes after messages of the same moment
    rows = _rows(schedule, made, starts, sums)
    return tuple(message for _, message in made), rows


def _check_ends(schedule: Schedule, skips: Pairs, shared: Pairs, rank_of: Sequence[int]) -> None:
    stages = schedule.model_stages
    for source, target in skips:
        if not 0 <= source < target - 1 < stages - 1:
            raise ScheduleError(
                f"skips has {(source, target)}: a message goes past a stage at least, to one of the {stages}"
            )
    for later, earlier in shared:
        if not 0 <= earlier < later < stages:
            raise ScheduleError(
                f"shared has {(later, earlier)}: gradients go from a stage to an earlier one of the {stages}"
            )
    if len(rank_of) != schedule.devices or min(rank_of) < 0:
        raise ScheduleError(
            f"rank_of must name a rank from 0 for each of {schedule.devices} devices, got {list(rank_of)}"
        )


def _play(schedule: Schedule) -> tuple[list[list[float]], list[list[float]]]:
    """When each action starts and ends, in units of time; the devices of a REDUCE_GRAD meet."""
    found = dependencies(schedule)
    units = np.zeros(found.actions)
    for kind, unit in _UNITS.items():
        np.add.at(units, found.owner[found.is_kind(kind)], unit)
    ends = play_waits(schedule, found, _waits(schedule, found), units)
    starts = ends - units
    spans = list(zip(found.offsets, found.offsets[1:], strict=False))
    return [starts[a:b].tolist() for a, b in spans], [ends[a:b].tolist() for a, b in spans]


def _waits(schedule: Schedule, found: Dependencies) -> Waits:
    """What actions wait for: their inputs, and at a REDUCE_GRAD the devices of the other copies."""
    rows = np.flatnonzero(found.is_kind(Kind.REDUCE_GRAD))
    stage = found.stage[rows]
    device = np.asarray(schedule.device_of)[stage]
    is_first = np.isin(found.owner[rows], found.offsets)  # nothing comes before it on its device
    same = (stage[:, None] - stage) % schedule.model_stages == 0
    one, other = np.nonzero(same & (device[:, None] != device) & ~is_first)
    awaited, waiting = found.owner[rows[other]], found.owner[rows[one]]
    return Waits(
        np.concatenate([found.source, awaited]),
        np.concatenate([found.source, awaited - 1]),
        np.concatenate([found.target, waiting]),
    )


def _targets(
    schedule: Schedule, skips: Pairs, shared: Pairs, rank_of: Sequence[int]
) -> dict[tuple[bool, int], list[Message]]:
    """What a forward (True), or a backward, of each stage sends to other ranks; the micro-batch is filled in later."""
    found: dict[tuple[bool, int], list[Message]] = {}
    for stage in range(schedule.stages):
        first = stage - stage % schedule.model_stages
        after, before = schedule.next_stage(stage), schedule.previous_stage(stage)
        past = sorted(first + target for source, target in skips if first + source == stage)
        back = sorted((first + source for source, target in skips if first + target == stage), reverse=True)
        ends = [(Kind.F, target, 0) for target in (after, *past)]
        ends += [(Kind.B, target, 0) for target in (before, *back)]
        ends += [
            (Kind.W, first + earlier, n)
            for n, (later, earlier) in enumerate(shared)
            if first + later == stage
        ]
        rank = rank_of[schedule.device_of[stage]]
        for kind, target, number in ends:
            if target is not None and (other := rank_of[schedule.device_of[target]]) != rank:
                message = Message(kind, (stage, target), (rank, other), None, number)
                found.setdefault((kind is Kind.F, stage), []).append(message)
    return found


def _made(
    schedule: Schedule, targets: dict[tuple[bool, int], list[Message]], ends: list[list[float]]
) -> Iterator[tuple[float, Message]]:
    """Yield each message with the moment at which it is made."""
    for row, ended in zip(schedule.actions, ends, strict=True):
        for action, end in zip(row, ended, strict=True):
            for leaf in action.leaves:
                if leaf.kind in COMPUTES:
                    for kind, stages, ranks, _, number in targets.get((leaf.kind is Kind.F, leaf.stage), ()):
                        yield end, Message(kind, stages, ranks, leaf.micro_batch, number)


def _rows(
    schedule: Schedule,
    made: list[tuple[float, Message]],
    starts: list[list[float]],
    sums: dict[int, Message],
) -> list[Row]:
    """The row of each device with its messages, each before the first action that starts no earlier."""
    own: list[list[tuple[float, Message]]] = [[] for _ in schedule.actions]
    for moment, message in made:
        if message.kind is not Kind.REDUCE_GRAD:
            for stage in message.stages:
                own[schedule.device_of[stage]].append((moment, message))
    rows: list[Row] = []
    for row, begun, messages in zip(schedule.actions, starts, own, strict=True):
        merged: list[Action | Message] = []
        left = 0
        for action, start in zip(row, begun, strict=True):
            while left < len(messages) and messages[left][0] <= start:
                merged.append(messages[left][1])
                left += 1
            is_sum = action.kind is Kind.REDUCE_GRAD
            merged.append(sums.get(action.stage, action) if is_sum else action)
        merged += [message for _, message in messages[left:]]
        rows.append(merged)
    return rows
