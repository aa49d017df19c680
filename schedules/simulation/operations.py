"""Converts actions and their dependencies to operations of the event loop.

In the event loop an operation has one input at most, and one operation at most reads its result. So an action with k
inputs gets k - 1 operations of no length before it that wait for the others, and one with k readers gets k - 1 behind
it. A link that carries one message at a time is a row of its own, with an operation for each message:

    edges            rows of operations
    a ─┐             device 0   a
       ├─> c         device 1   b
    b ─┘             device 2   (wait for b) (c, after a)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .event_loop import Operations


@dataclass(frozen=True, eq=False)
class ActionOperations:
    """The operations of a schedule's actions.

    table: of each operation its length, input and delay.
    rows: the operations of each device, then of each link.
    place: the operation of each action, an array.
    sender: of each edge the operation that makes its message; `receiver`: the one that takes it.
    carried: the edges whose message has an operation on a link; `carrier`: that operation.
    """

    table: Operations
    rows: list[range]
    place: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    carried: np.ndarray
    carrier: np.ndarray


def make_operations(
    offsets: Sequence[int],
    seconds: np.ndarray,
    edges: tuple[np.ndarray, np.ndarray],
    delay: np.ndarray,
    occupancy: np.ndarray | None = None,
    link: np.ndarray | None = None,
) -> ActionOperations:
    """Return the operations of actions numbered device after device.

    offsets: device d has the actions offsets[d] to offsets[d + 1] - 1.
    seconds: of each action.
    edges: the actions at which each edge begins and ends.
    delay: of each edge, the seconds from the end of its first action until its message is there; with occupancy, from
        when the message leaves the link.
    occupancy: of each edge, the seconds for which its message occupies its link, whose number is in `link`; left out,
        links carry any number of messages at a time.
    """
    source, target = edges
    actions = offsets[-1]
    outs, out_rank = _ranks(source, actions)
    ins, in_rank = _ranks(target, actions)
    before, behind = np.maximum(ins - 1, 0), np.maximum(outs - 1, 0)
    place = np.arange(actions) + np.cumsum(before) + np.cumsum(behind) - behind
    own = actions + int(before.sum() + behind.sum())
    bounds = np.append(place - before, own)[np.asarray(offsets)].tolist()
    rows = [range(*span) for span in pairwise(bounds)]
    sender, receiver = place[source] + out_rank, place[target] - in_rank

    carried = np.empty(0, dtype=np.int64)
    if occupancy is not None and link is not None:
        carried = np.flatnonzero(occupancy)
        carried = carried[np.lexsort((carried, source[carried], link[carried]))]
    carrier = own + np.arange(carried.size)
    lengths, inputs, delays = (np.zeros(own + carried.size, kind) for kind in (float, np.int64, float))
    inputs -= 1
    lengths[place] = seconds
    inputs[receiver], delays[receiver] = sender, delay
    if occupancy is not None and link is not None and carried.size:
        lengths[carrier] = occupancy[carried]
        inputs[carrier], inputs[receiver[carried]] = sender[carried], carrier
        _, first = np.unique(link[carried], return_index=True)
        rows += [range(*span) for span in pairwise([*(own + first).tolist(), own + carried.size])]
    table = Operations(lengths.tolist(), inputs.tolist(), delays.tolist())
    return ActionOperations(table, rows, place, sender, receiver, carried, carrier)


def _ranks(ends: np.ndarray, actions: int) -> tuple[np.ndarray, np.ndarray]:
    """How many edges end at each action, and of each edge its number among those of its action."""
    counts = np.bincount(ends, minlength=actions)
    rank = np.zeros(ends.size, dtype=np.int64)
    if counts.max(initial=0) > 1:
        order = np.argsort(ends, kind="stable")
        rank[order] = np.arange(ends.size) - (np.cumsum(counts) - counts)[ends[order]]
    return counts, rank
