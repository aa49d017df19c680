"""Finds when the inputs of each action arrive, from the message and host copy times of a timeline."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.action import COMMUNICATION, Action, Kind
from ..core.dependencies import Dependencies
from ..core.schedule import Schedule
from ..core.transfer import Transfer


def arrivals(schedule: Schedule, found: Dependencies, transfers: Sequence[Transfer]) -> list[float | None]:
    """Return the arrival time in seconds of each edge's message; None if no transfer carries it.

    Edges within a device have none, except copies to and from its host; edges of explicit sends and receives have none.
    """
    if not len(transfers):
        return [None] * found.source.size
    arrived = {
        (each.source, each.target, each.micro_batch, each.kind in (Kind.F, Kind.OFFLOAD)): each.end
        for each in transfers
    }
    actions = [action for row in schedule.actions for action in row]
    ends = (found.target, found.source_stage, found.target_stage, found.is_copy)
    return [
        arrived.get((sender, receiver, *_read(actions[target], sender, receiver)))
        if is_copy
        or (
            schedule.device_of[sender] != schedule.device_of[receiver]
            and actions[target].kind not in COMMUNICATION
        )
        else None
        for target, sender, receiver, is_copy in zip(*(column.tolist() for column in ends), strict=True)
    ]


def _read(action: Action, sender: int, receiver: int) -> tuple[int | None, bool]:
    """Return the micro-batch of the message that an action takes from a stage, and whether it is an output."""
    if action.kind is Kind.OFFLOAD:
        return action.micro_batch, True
    forward = receiver == sender + 1 and any(leaf.kind is Kind.F for leaf in action.leaves)
    numbers = (
        leaf.micro_batch
        for leaf in action.leaves
        if leaf.stage == receiver and (leaf.kind is Kind.F) == forward
    )
    return next(numbers, None), forward
