"""Says why the sends and receives of a schedule do not fit together."""

from __future__ import annotations

from collections import defaultdict

from ..core.action import COMMUNICATION, Action, Kind, ScheduleError
from ..core.schedule import Schedule
from .deadlock import matching, refuse_rendezvous_deadlock

_SENDS = (Kind.SEND_F, Kind.SEND_B)


def check_messages(schedule: Schedule) -> None:
    """Return if every message between two devices is sent once and received once, in the same order.

    Raises ScheduleError, naming the message and what it conflicts with.
    """
    position = {
        leaf: number
        for row in schedule.actions
        for number, action in enumerate(row)
        for leaf in action.leaves
    }
    for action in position:
        if action.kind in COMMUNICATION:
            _check_message(schedule, action, position)
        else:
            _check_carried(schedule, action, position)
    _check_order(schedule)
    refuse_rendezvous_deadlock(schedule)


def _check_message(schedule: Schedule, message: Action, position: dict[Action, int]) -> None:
    """It goes from one stage to the next on another device, has its other end, and stands by its action."""
    other = matching(message)
    ahead = message.kind in (Kind.SEND_F, Kind.RECV_B)
    neighbour = schedule.next_stage(message.stage) if ahead else schedule.previous_stage(message.stage)
    if neighbour is None:
        raise ScheduleError(f"{message} goes nowhere: stage {message.stage} is at the end of the model")
    if schedule.device_of[neighbour] == schedule.device_of[message.stage]:
        raise ScheduleError(f"{message}: stages {message.stage} and {neighbour} are on the same device")
    if other not in position:
        raise ScheduleError(f"{message} has no {other} on device {schedule.device_of[neighbour]}")
    worker = _worker(message, position)
    if worker is None:
        raise ScheduleError(f"{message} belongs to no action of micro-batch {message.micro_batch}")
    if message.kind in _SENDS and position[worker] > position[message]:
        raise ScheduleError(f"{message} comes before {worker}, which makes what it sends")
    if message.kind not in _SENDS and position[worker] < position[message]:
        raise ScheduleError(f"{message} comes after {worker}, which needs what it receives")


def _check_carried(schedule: Schedule, action: Action, position: dict[Action, int]) -> None:
    """What the action needs from another device is received."""
    if action.kind is Kind.F:
        neighbour, kind = schedule.previous_stage(action.stage), Kind.RECV_F
    elif action.kind in (Kind.I, Kind.B):
        neighbour, kind = schedule.next_stage(action.stage), Kind.RECV_B
    else:
        return
    if neighbour is None or schedule.device_of[neighbour] == schedule.device_of[action.stage]:
        return
    receive = action._replace(kind=kind)
    if receive not in position:
        raise ScheduleError(f"{action} needs {receive}, which is missing")


def _worker(message: Action, position: dict[Action, int]) -> Action | None:
    """The action that makes what is sent, or needs what is received."""
    kinds = (Kind.F,) if message.kind in (Kind.SEND_F, Kind.RECV_F) else (Kind.I, Kind.B)
    return next((action for kind in kinds if (action := message._replace(kind=kind)) in position), None)


def _check_order(schedule: Schedule) -> None:
    """Both ends of a pair of devices see their messages in the same order."""
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for device, row in enumerate(schedule.actions):
        for action in (action for action in row if action.kind in COMMUNICATION):
            peer = schedule.device_of[matching(action).stage]
            if action.kind in _SENDS:
                sent[device, peer].append(action)
            else:
                received[peer, device].append(action)
    for pair, sends in sent.items():
        for send, receive in zip(sends, received[pair], strict=True):
            if matching(send) != receive:
                raise ScheduleError(
                    f"device {pair[0]} sends {send} where device {pair[1]} receives {receive}: orders differ"
                )
