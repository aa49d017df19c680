"""Sends and receives: makes the messages between devices part of a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..core.action import COMMUNICATION, Action, Kind, ScheduleError
from ..core.schedule import Schedule
from ..validation.deadlock import matching


def insert_messages(schedule: Schedule) -> Schedule:
    """Return the schedule with a send after each action whose result another device needs, and its receive.

    The devices are walked in the order of their dependencies, and each send puts its receive at once at the
    end of what the other device has by then: so both ends of a pair see their messages in the same order, and
    no device waits for ever even where a send waits for its receive. Stages on the same device pass their
    results on without a message. A schedule that has messages comes back as it is.

    Raises ScheduleError when the schedule deadlocks.

    Source: the lowering of torch.distributed.pipelining, `_add_send_recv`.
    """
    if any(action.kind in COMMUNICATION for row in schedule.actions for action in row):
        return schedule
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    have: list[set[Action]] = [set() for _ in schedule.actions]
    position = [0] * schedule.devices
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.actions):
            if position[device] == len(row) or not _can_run(schedule, row[position[device]], have[device]):
                continue
            action = row[position[device]]
            position[device] += 1
            moved = True
            rows[device].append(action)
            for leaf in action.leaves:
                have[device].add(leaf._replace(kind=Kind.I) if leaf.kind is Kind.B else leaf)
                for send in _sends(schedule, leaf):
                    receive = matching(send)
                    rows[device].append(send)
                    rows[schedule.device_of[receive.stage]].append(receive)
                    have[schedule.device_of[receive.stage]].add(receive)
    for device, row in enumerate(schedule.actions):
        if position[device] < len(row):
            raise ScheduleError(
                f"{schedule.name} deadlocks: device {device} cannot run {row[position[device]]}"
            )
    return replace(schedule, actions=tuple(map(tuple, rows)))


def _sends(schedule: Schedule, leaf: Action) -> Iterator[Action]:
    """The send of what a forward or a backward makes, if another device needs it."""
    if leaf.kind is Kind.F:
        target, kind = schedule.next_stage(leaf.stage), Kind.SEND_F
    elif leaf.kind in (Kind.I, Kind.B):
        target, kind = schedule.previous_stage(leaf.stage), Kind.SEND_B
    else:
        return
    if target is not None and schedule.device_of[target] != schedule.device_of[leaf.stage]:
        yield leaf._replace(kind=kind)


def _can_run(schedule: Schedule, action: Action, have: set[Action]) -> bool:
    return all(need in have for leaf in action.leaves for need in _needs(schedule, leaf))


def _needs(schedule: Schedule, leaf: Action) -> Iterator[Action]:
    """The receive, or the action on the same device, that an action takes its input from."""
    if leaf.kind is Kind.F:
        source, made, received = schedule.previous_stage(leaf.stage), Kind.F, Kind.RECV_F
    elif leaf.kind in (Kind.I, Kind.B):
        source, made, received = schedule.next_stage(leaf.stage), Kind.I, Kind.RECV_B
    else:
        return
    if source is None:
        return
    if schedule.device_of[source] == schedule.device_of[leaf.stage]:
        yield leaf._replace(kind=made, stage=source)
    else:
        yield leaf._replace(kind=received)
