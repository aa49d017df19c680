"""Finds the critical path of a timeline: the chain of actions that determines its makespan."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

from ..core.action import Action
from ..core.dependencies import dependencies
from ..core.timed_schedule import TimedSchedule
from .waits import arrivals


def critical_path(timeline: TimedSchedule) -> tuple[Action, ...]:
    """Return the chain of actions that determines the makespan, first to last.

    Walks back from the action that ends last, each time to what released the action last: the end of the action
    before it on its device, or the arrival of an input. A message without a transfer arrives when it is made. In a
    tie the action on the same device is taken.
    """
    actions = list(chain.from_iterable(timeline.schedule.actions))
    if not actions:
        return ()
    starts, ends = list(chain.from_iterable(timeline.starts)), list(chain.from_iterable(timeline.ends))
    graph = dependencies(timeline.schedule)
    inputs: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)  # when, and from which action
    for first, last in zip(graph.offsets, graph.offsets[1:], strict=False):
        for action in range(first + 1, last):
            inputs[action].append((ends[action - 1], action - 1))
    edges = zip(graph.source.tolist(), graph.target.tolist(), arrivals(timeline, graph), strict=True)
    for source, target, arrival in edges:
        inputs[target].append((ends[source] if arrival is None else arrival, source))
    last = max(range(len(actions)), key=lambda action: (ends[action], starts[action]))
    path = [last]
    while inputs[path[-1]]:
        _, before = max(inputs[path[-1]], key=lambda released: released[0])
        path.append(before)
    return tuple(actions[number] for number in reversed(path))
