"""The event loop: computes when each operation ends if every device runs its row as early as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

PENDING = -1.0  # and below: an operation that has not run


class Operations(NamedTuple):
    """Duration and input of each operation, by operation number.

    seconds: how long it takes.
    source: the operation whose result it needs, -1 for none. No two operations need the same one.
    delay: seconds from the end of its source until the result is there.
    """

    seconds: Sequence[float]
    source: Sequence[int]
    delay: Sequence[float]


def play(operations: Operations, rows: Sequence[Sequence[int]]) -> tuple[list[float], bool]:
    """Return the end of each operation (negative if it can never run), and True if all can run.

    rows: the operations of each device, in order.
    """
    ends = [PENDING] * len(operations.source)
    done = _run(operations, rows, ends, [0] * len(rows), [0.0] * len(rows))
    return ends, done


def replay(
    operations: Operations, rows: Sequence[Sequence[int]], ends: Sequence[float], device: int, first: int
) -> tuple[list[float], bool]:
    """Update the result of `play` after one row has changed from position `first` on.

    ends: the end of each operation before the change. Operations that ended before the change can matter are not
        played again.
    """
    moment = ends[rows[device][first - 1]] if first else 0.0
    position = [bisect_left(row, moment, key=ends.__getitem__) for row in rows]
    position[device] = first
    clock = [ends[row[at - 1]] if at else 0.0 for row, at in zip(rows, position, strict=True)]
    changed = list(ends)
    for row, at in zip(rows, position, strict=True):
        for operation in row[at:]:
            changed[operation] = PENDING
    return changed, _run(operations, rows, changed, position, clock)


def _run(
    operations: Operations,
    rows: Sequence[Sequence[int]],
    ends: list[float],
    position: list[int],
    clock: list[float],
) -> bool:
    """Play on from a position and a time on each device, and fill in `ends`; return whether all have run."""
    seconds, source, delay = operations
    left = sum(map(len, rows)) - sum(position)
    able = list(range(len(rows) - 1, -1, -1))  # the devices that may be able to go on
    while able:
        device = able.pop()
        row, now = rows[device], clock[device]
        first = at = position[device]
        while at < len(row):
            operation = row[at]
            needed = source[operation]
            if needed >= 0:
                ready = ends[needed]
                if ready < 0:
                    ends[needed] = PENDING - 1 - device  # this device waits for it
                    break
                ready += delay[operation]
                if ready > now:
                    now = ready
            now += seconds[operation]
            if ends[operation] < PENDING:
                able.append(int(PENDING - 1 - ends[operation]))
            ends[operation] = now
            at += 1
        left -= at - first
        position[device], clock[device] = at, now
    return left == 0
