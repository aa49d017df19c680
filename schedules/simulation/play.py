"""Plays a schedule: each device runs its actions in order, as early as possible, and messages travel between them.

The play goes through the ends of actions in the order of time, so that messages pass a port in the order of sending::

    device 0  [F]───► port ██████           sent first
    device 1  [ F ]─────► port ..... ██████  waits for the port
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ..core.action import Action, ScheduleError
from ..core.dependencies import Dependencies
from ..core.schedule import Schedule
from .ports import Journeys

_NEVER = -1.0


@dataclass(frozen=True, eq=False)
class Played:
    """The times of a schedule, in seconds.

    starts, ends: of each action, in the numbers of its `Dependencies`.
    left, arrived: of each edge, when its message left and arrived.
    """

    starts: list[float]
    ends: list[float]
    left: list[float]
    arrived: list[float]


def play(schedule: Schedule, graph: Dependencies, seconds: np.ndarray, travels: Journeys) -> Played:
    """Return the times of a schedule in which each device runs its actions as early as possible.

    Takes O(n log n) for n actions. Of messages sent at the same time that of the lower action goes first.

    Args:
        schedule: the actions.
        graph: its dependencies.
        seconds: of each action.
        travels: how the message of each edge travels.

    Raises:
        ScheduleError: devices wait for each other for ever; the message names the cycle.
    """
    # Lists, which are faster than arrays to read one by one.
    lengths, targets, travel = seconds.tolist(), graph.target.tolist(), travels.seconds.tolist()
    by_source = np.argsort(graph.source, kind="stable")
    first_out = np.searchsorted(graph.source[by_source], np.arange(graph.actions + 1)).tolist()
    outs = by_source.tolist()  # the edges from action a are outs[first_out[a] : first_out[a + 1]]
    # Of each action, the inputs that are not on their way yet.
    missing = np.bincount(graph.target, minlength=graph.actions).tolist()
    device_of = np.repeat(np.arange(schedule.devices), np.diff(graph.offsets)).tolist()
    following, stop = list(graph.offsets[:-1]), graph.offsets[1:]  # of each device: its next action, its end
    clock = [0.0] * schedule.devices  # when each device is free; _NEVER while it is busy
    ready, starts, ends = [0.0] * graph.actions, [_NEVER] * graph.actions, [_NEVER] * graph.actions
    left, arrived = [0.0] * len(targets), [0.0] * len(targets)
    free: dict[int, float] = {}  # when each port is free
    running: list[tuple[float, int]] = []
    able = list(range(schedule.devices))  # the devices that may be able to go on
    while True:
        for device in able:
            action = following[device]
            if action < stop[device] and not missing[action] and clock[device] != _NEVER:
                start = ready[action]
                if clock[device] > start:
                    start = clock[device]
                starts[action], clock[device] = start, _NEVER
                heappush(running, (start + lengths[action], action))
        if not running:
            break
        now, action = heappop(running)
        ends[action] = now
        device = device_of[action]
        following[device], clock[device] = action + 1, now
        able = [device]
        for edge in outs[first_out[action] : first_out[action + 1]]:
            leaves = _pass(travels.ports[edge], now, free) if edge in travels.ports else now
            left[edge], arrived[edge] = leaves, leaves + travel[edge]
            target = targets[edge]
            if arrived[edge] > ready[target]:
                ready[target] = arrived[edge]
            missing[target] -= 1
            if not missing[target]:
                able.append(device_of[target])
    if _NEVER in ends:
        raise ScheduleError(f"deadlock: {_cycle(schedule, graph, np.array(ends) != _NEVER)}")
    return Played(starts, ends, left, arrived)


def _pass(ports: Sequence[tuple[int, float]], now: float, free: dict[int, float]) -> float:
    """Return when a message leaves that is sent now, and keep its ports for it."""
    leaves = now
    for port, _ in ports:
        leaves = max(leaves, free.get(port, 0.0))
    for port, taken in ports:
        free[port] = leaves + taken
    return leaves


def refuse_deadlock(schedule: Schedule, graph: Dependencies) -> None:
    """Raise ScheduleError if some device can never finish its list of actions."""
    nothing = np.zeros(graph.source.size)
    play(schedule, graph, np.zeros(graph.actions), Journeys(nothing, {}, {}))


def _cycle(schedule: Schedule, graph: Dependencies, ran: np.ndarray) -> str:
    """Return who waits for whom. Each device that is stuck waits for another one that is, or for itself."""
    actions: list[Action] = [action for row in schedule.leaves for action in row]
    reason: dict[int, str] = {}
    device = int(np.searchsorted(graph.offsets, np.flatnonzero(~ran)[0], side="right")) - 1
    while device not in reason:
        first, last = graph.offsets[device : device + 2]
        at = first + int(ran[first:last].sum())
        awaited = int(graph.source[(graph.target == at) & ~ran[graph.source]][0])
        reason[device] = f"device {device} at {actions[at]} for {actions[awaited]}"
        device = int(np.searchsorted(graph.offsets, awaited, side="right")) - 1
    cycle = list(reason.values())[list(reason).index(device) :]
    if len(cycle) == 1:
        return f"{cycle[0]}, which comes later on the same device"
    return f"{'; '.join(cycle)}: each waits for the next"
