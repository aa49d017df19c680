"""Which actions fix the makespan of a timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from ..core.action import COMMUNICATION, Action
from ..core.dependencies import dependencies
from ..core.schedule import Schedule


def critical_path(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> tuple[Action, ...]:
    """Return the actions that fix the makespan, first to last.

    Walks back from the action that ends last, each time to what ended last of all that the action had to wait
    for: the action before it on its device, or one whose output it takes.
    """
    actions = list(chain.from_iterable(schedule.actions))
    if not actions:
        return ()
    started, ended = list(chain.from_iterable(starts)), list(chain.from_iterable(ends))
    found = dependencies(schedule)
    inputs: defaultdict[int, list[int]] = defaultdict(list)
    for source, target in zip(found.source.tolist(), found.target.tolist(), strict=True):
        inputs[target].append(source)
    for first, row in zip(found.offsets, schedule.actions, strict=False):
        _add_turns(first, row, inputs)
    last = max(range(len(actions)), key=lambda action: (ended[action], started[action]))
    path = [last]
    while inputs[path[-1]]:
        path.append(max(inputs[path[-1]], key=lambda action: ended[action]))
    return tuple(actions[number] for number in reversed(path))


def _add_turns(first: int, row: Sequence[Action], inputs: defaultdict[int, list[int]]) -> None:
    """Let each action wait for what its device computes before it; it comes first, so that it wins a tie."""
    before = None
    for number, action in enumerate(row, first):
        if before is not None:
            inputs[number].insert(0, before)
        if action.kind not in COMMUNICATION:
            before = number
