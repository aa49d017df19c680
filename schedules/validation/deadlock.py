"""Detects deadlocks: devices of a schedule that wait for each other forever."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..core.action import COMMUNICATION, ScheduleError
from ..core.dependencies import Dependencies, dependencies
from ..core.schedule import Schedule
from ..simulation.event_loop import play
from ..simulation.operations import make_operations

Sends = Literal["rendezvous", "buffered"]


def refuse_deadlock(schedule: Schedule, sends: Sends) -> None:
    """Raise ScheduleError unless every device can run its list to the end.

    Plays the schedule without durations. A buffered send never waits. A send with rendezvous waits until the device
    at the other end has come to the receive.
    """
    found = dependencies(schedule)
    awaited, source, target = _edges(found, sends)
    nothing = np.zeros(found.actions)
    operations = make_operations(found.offsets, nothing, (source, target), np.zeros(source.size))
    ends, done = play(operations.table, operations.rows)
    if done:
        return
    ran = np.asarray(ends)[operations.place] >= 0
    stuck = []
    actions = [action for row in schedule.actions for action in row]
    for device, (first, last) in enumerate(zip(found.offsets, found.offsets[1:], strict=False)):
        at = first + int(ran[first:last].sum())
        if at < last:
            missing = next(iter(awaited[(target == at) & ~ran[source]].tolist()))
            stuck.append(f"device {device} at {actions[at]} for {actions[missing]}")
    has_messages = found.is_kind(*COMMUNICATION).any()
    if sends == "rendezvous" and has_messages:
        raise ScheduleError(
            f"deadlock if a send waits for its receive: {'; '.join(stuck)} waits; "
            "where sends do not block, check with sends='buffered'"
        )
    raise ScheduleError(f"deadlock: {'; '.join(stuck)} waits")


def _edges(found: Dependencies, sends: Sends) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of each edge the action that is awaited, the one that has to be done by then, and the one that waits.

    With rendezvous the two ends of a message wait for each other: each needs what precedes the other on its device.
    """
    if sends == "buffered":
        return found.source, found.source, found.target
    message = np.zeros(found.actions, dtype=bool)
    message[found.owner[found.is_kind(*COMMUNICATION)]] = True
    meet = message[found.source] & message[found.target]
    awaited = np.concatenate([found.source, found.target[meet]])
    waits = np.concatenate([found.target, found.source[meet]])
    before = np.concatenate([np.where(meet, found.source - 1, found.source), found.target[meet] - 1])
    first = np.zeros(found.actions, dtype=bool)
    first[np.asarray([at for at in found.offsets[:-1] if at < found.actions], dtype=np.int64)] = True
    at_once = np.concatenate([meet, np.ones(int(meet.sum()), dtype=bool)]) & first[awaited]
    return awaited[~at_once], before[~at_once], waits[~at_once]
