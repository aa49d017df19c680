"""Checks that the sends and receives of a schedule match."""

from __future__ import annotations

from ..core.action import COMMUNICATION, Action, ScheduleError
from ..core.dependencies import COMPUTES, FLOW_OF, other_end, source_stage, target_stage
from ..core.schedule import Schedule


def check_messages(schedule: Schedule) -> None:
    """Raise ScheduleError unless every message between two devices is sent once and received once.

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
        elif action.kind in COMPUTES:
            _check_received(schedule, action, position)


def _check_message(schedule: Schedule, message: Action, position: dict[Action, int]) -> None:
    """Check one end: it leads to another device, has its other end, and is in order with its action."""
    flow = FLOW_OF[message.kind]
    is_send = message.kind is flow.send
    neighbour = (target_stage if is_send else source_stage)(
        message.kind, message.stage, schedule.model_stages
    )
    if neighbour is None:
        raise ScheduleError(f"{message} goes nowhere: stage {message.stage} is at the end of the model")
    if schedule.device_of[neighbour] == schedule.device_of[message.stage]:
        raise ScheduleError(f"{message}: stages {message.stage} and {neighbour} are on the same device")
    other = other_end(message)
    if other not in position:
        raise ScheduleError(f"{message} has no {other} on device {schedule.device_of[neighbour]}")
    actions = (message._replace(kind=kind) for kind in flow.makers)
    action = next((action for action in actions if action in position), None)
    if action is None:
        raise ScheduleError(f"{message} belongs to no action of micro-batch {message.micro_batch}")
    if is_send and position[action] > position[message]:
        raise ScheduleError(f"{message} comes before {action}, which makes what it sends")
    if not is_send and position[action] < position[message]:
        raise ScheduleError(f"{message} comes after {action}, which needs what it receives")


def _check_received(schedule: Schedule, action: Action, position: dict[Action, int]) -> None:
    """Check that an action receives what it needs from another device."""
    source = source_stage(action.kind, action.stage, schedule.model_stages)
    if source is None or schedule.device_of[source] == schedule.device_of[action.stage]:
        return
    receive = action._replace(kind=FLOW_OF[action.kind].receive)
    if receive not in position:
        raise ScheduleError(f"{action} needs {receive}, which is missing")
