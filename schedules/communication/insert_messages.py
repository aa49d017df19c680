"""Inserts send and receive actions into a schedule, and reads the messages of a schedule that has them."""

from __future__ import annotations

from dataclasses import replace

from ..core.action import COMMUNICATION, Action, Kind
from ..core.dependencies import FLOW_OF, other_end
from ..core.message import Message
from ..core.schedule import Schedule
from .lowering import Lowering, Row, lower, reductions

_SENDS = {Kind.F: (Kind.SEND_F, Kind.RECV_F), Kind.B: (Kind.SEND_B, Kind.RECV_B)}


def insert_messages(schedule: Schedule) -> Schedule:
    """Return the schedule with a send and a receive for each result that another device needs.

    The messages are in the order of `message_order` on all devices, so there is no deadlock, even if a send
    blocks until its receive. Stages on one device need no message. A schedule with messages is returned unchanged.

    Raises:
        ScheduleError: the schedule deadlocks.

    >>> from schedules import build
    >>> print(insert_messages(build("1f1b", devices=2, micro_batches=2)).to_csv(), end="")
    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
    1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1
    """
    if has_messages(schedule):
        return schedule
    rows = (
        tuple(_action(item, schedule, device) for item in row)
        for device, row in enumerate(lower(schedule).rows)
    )
    return replace(schedule, actions=tuple(rows))


def has_messages(schedule: Schedule) -> bool:
    """Return whether the schedule has sends and receives."""
    return any(action.kind in COMMUNICATION for row in schedule.actions for action in row)


def as_written(schedule: Schedule) -> Lowering:
    """Return a schedule that has messages as a `Lowering`, in the order of its rows; each device is a rank."""
    rank_of = range(schedule.devices)
    sums = reductions(schedule, rank_of)
    rows: list[Row] = []
    for row in schedule.actions:
        items: list[Action | Message] = []
        for action in row:
            if action.kind in COMMUNICATION:
                items.append(_message(action, schedule))
            elif action.kind is Kind.REDUCE_GRAD:
                items.append(sums.get(action.stage, action))
            else:
                items.append(action)
        rows.append(items)
    orders = [[item for item in row if isinstance(item, Message)] for row in rows]
    return Lowering(schedule, rank_of, rows, orders)


def _action(item: Action | Message, schedule: Schedule, device: int) -> Action:
    """Return a message as the action of one of its devices."""
    if isinstance(item, Action):
        return item
    if item.kind is Kind.REDUCE_GRAD:
        own = next(stage for stage in item.stages if schedule.device_of[stage] == device)
        return Action(item.kind, own)
    source, target = item.stages
    send, receive = _SENDS[item.kind]
    sends = schedule.device_of[source] == device
    return Action(send if sends else receive, source if sends else target, item.micro_batch)


def _message(action: Action, schedule: Schedule) -> Message:
    """Return the message of a send or receive action."""
    flow = FLOW_OF[action.kind]
    ends = action.stage, other_end(action).stage
    stages = ends if action.kind is flow.send else ends[::-1]
    ranks = schedule.device_of[stages[0]], schedule.device_of[stages[1]]
    return Message(flow.makers[0] if flow.step > 0 else Kind.B, stages, ranks, action.micro_batch)
