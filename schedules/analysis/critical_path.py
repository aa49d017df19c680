"""Finds the critical path of a timeline: the chain of actions that determines its makespan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from ..core.action import COMMUNICATION, Action
from ..core.dependencies import dependencies
from ..core.schedule import Schedule
from ..core.transfer import Transfer
from .arrivals import arrivals


def critical_path(
    schedule: Schedule,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    transfers: Sequence[Transfer] = (),
) -> tuple[Action, ...]:
    """Return the chain of actions that determines the makespan, first to last.

    Walks back from the action that ends last, each time to what released the action last: the end of the action
    before it on its device, or the arrival of an input. A message without a transfer arrives when it is made. In a
    tie the action on the same device is taken.
    """
    actions = list(chain.from_iterable(schedule.actions))
    if not actions:
        return ()
    started, ended = list(chain.from_iterable(starts)), list(chain.from_iterable(ends))
    found = dependencies(schedule)
    inputs: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)  # when, and from which action
    edges = zip(
        found.source.tolist(), found.target.tolist(), arrivals(schedule, found, transfers), strict=True
    )
    for source, target, arrival in edges:
        inputs[target].append((ended[source] if arrival is None else arrival, source))
    for first, row in zip(found.offsets, schedule.actions, strict=False):
        _add_turns(first, row, ended, inputs)
    last = max(range(len(actions)), key=lambda action: (ended[action], started[action]))
    path = [last]
    while inputs[path[-1]]:
        _, before = max(inputs[path[-1]], key=lambda released: released[0])
        path.append(before)
    return tuple(actions[number] for number in reversed(path))


def _add_turns(
    first: int, row: Sequence[Action], ended: Sequence[float], inputs: dict[int, list[tuple[float, int]]]
) -> None:
    """Let each action wait for what its device computes before it; that comes first, so that it wins a tie."""
    before = None
    for number, action in enumerate(row, first):
        if before is not None:
            inputs[number].insert(0, (ended[before], before))
        if action.kind not in COMMUNICATION:
            before = number
