"""Detects deadlocks: devices of a schedule that wait for each other forever."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..core.action import ScheduleError
from ..core.dependencies import Dependencies, dependencies
from ..core.schedule import Schedule
from .event_loop import play
from .operations import make_operations


class Waits(NamedTuple):
    """The waits between actions, as arrays with one entry per wait.

    awaited: the action that is waited for.
    done: the action that has to be done by then; where two devices meet, the one before the awaited action.
    waiting: the action that waits.
    """

    awaited: np.ndarray
    done: np.ndarray
    waiting: np.ndarray


def refuse_deadlock(schedule: Schedule) -> None:
    """Raise ScheduleError if some device can never finish its list of actions. Sends are buffered."""
    found = dependencies(schedule)
    play_waits(schedule, found, Waits(found.source, found.source, found.target), np.zeros(found.actions))


def play_waits(schedule: Schedule, found: Dependencies, waits: Waits, seconds: np.ndarray) -> np.ndarray:
    """Return the end of each action if each device runs its list as early as possible.

    Args:
        schedule: the actions.
        found: of the schedule.
        waits: what its actions wait for.
        seconds: of each action.

    Raises:
        ScheduleError: devices wait for each other for ever; the message names the cycle.
    """
    nothing = np.zeros(waits.done.size)
    operations = make_operations(found.offsets, seconds, (waits.done, waits.waiting), nothing)
    played, done = play(operations.table, operations.rows)
    ends = np.asarray(played)[operations.place]
    if not done:
        raise ScheduleError(f"deadlock: {_cycle(schedule, found, waits, ends >= 0)}")
    return ends


def _cycle(schedule: Schedule, found: Dependencies, waits: Waits, ran: np.ndarray) -> str:
    """Return who waits for whom. Each device that is stuck waits for another one that is, or for itself."""
    actions = [action for row in schedule.actions for action in row]
    reason: dict[int, str] = {}
    device = int(np.searchsorted(found.offsets, np.flatnonzero(~ran)[0], side="right")) - 1
    while device not in reason:
        first, last = found.offsets[device : device + 2]
        at = first + int(ran[first:last].sum())
        awaited = int(waits.awaited[(waits.waiting == at) & ~ran[waits.done]][0])
        reason[device] = f"device {device} at {actions[at]} for {actions[awaited]}"
        device = int(np.searchsorted(found.offsets, awaited, side="right")) - 1
    cycle = list(reason.values())[list(reason).index(device) :]
    if len(cycle) == 1:
        return f"{cycle[0]}, which comes later on the same device"
    return f"{'; '.join(cycle)}: each waits for the next"
