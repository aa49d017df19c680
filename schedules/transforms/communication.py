"""Makes the messages between devices part of a schedule: sends and receives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..core.action import COMMUNICATION, Action, Kind, ScheduleError
from ..core.dependencies import COMPUTES, FLOW_OF, other_end, source_stage, target_stage
from ..core.schedule import Schedule


def insert_messages(schedule: Schedule) -> Schedule:
    """Return the schedule with a send after each action whose result another device needs, and its receive.

    Walks the devices in the order of their dependencies. Each send appends its receive at once to the list of the
    other device. So both devices of a pair have their messages in the same order, and no device waits for ever even
    where a send blocks until its receive. Stages on one device need no message. A schedule that has messages comes
    back unchanged.

    Raises:
        ScheduleError: the schedule deadlocks.

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
                have[device].add(_as_result(leaf))
                for send in _sends(schedule, leaf):
                    receive = other_end(send)
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
    """Yield the send of the action's result, if another device needs it."""
    if leaf.kind not in COMPUTES:
        return
    target = target_stage(leaf.kind, leaf.stage, schedule.model_stages)
    if target is not None and schedule.device_of[target] != schedule.device_of[leaf.stage]:
        yield leaf._replace(kind=FLOW_OF[leaf.kind].send)


def _can_run(schedule: Schedule, action: Action, have: set[Action]) -> bool:
    return all(need in have for leaf in action.leaves for need in _needs(schedule, leaf))


def _needs(schedule: Schedule, leaf: Action) -> Iterator[Action]:
    """Yield the receive, or the result made on the same device, that an action takes as its input."""
    if leaf.kind not in COMPUTES:
        return
    source = source_stage(leaf.kind, leaf.stage, schedule.model_stages)
    if source is None:
        return
    if schedule.device_of[source] == schedule.device_of[leaf.stage]:
        yield _as_result(leaf._replace(stage=source))
    else:
        yield leaf._replace(kind=FLOW_OF[leaf.kind].receive)


def _as_result(leaf: Action) -> Action:
    """Return the action, with I in place of B: both pass the same gradient on."""
    return leaf._replace(kind=Kind.I) if leaf.kind is Kind.B else leaf
