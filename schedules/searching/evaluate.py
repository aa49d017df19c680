"""Plays rows of operations: when each ends; what search runs thousands of times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .problem import Problem, Row

_PENDING = -1.0


def play(problem: Problem, rows: Sequence[Row]) -> list[float] | None:
    """Return when each operation ends, each device as early as its row lets it; None on deadlock."""
    return _run(problem, rows, [_PENDING] * problem.operations, [0] * len(rows), [0.0] * len(rows))


def replay(
    problem: Problem, rows: Sequence[Row], ends: Sequence[float], device: int, first: int
) -> list[float] | None:
    """Return when each operation ends after a change to one row, from its position `first` on; None on deadlock.

    ends: when each ended before the change. What ended before the change can matter is not played again.
    """
    moment = ends[rows[device][first - 1]] if first else 0.0
    position = [bisect_left(row, moment, key=ends.__getitem__) for row in rows[:device]]
    position += [first, *(bisect_left(row, moment, key=ends.__getitem__) for row in rows[device + 1 :])]
    clock = [ends[row[at - 1]] if at else 0.0 for row, at in zip(rows, position, strict=True)]
    ends = list(ends)
    for row, at in zip(rows, position, strict=True):
        for operation in row[at:]:
            ends[operation] = _PENDING
    return _run(problem, rows, ends, position, clock)


def _run(
    problem: Problem, rows: Sequence[Row], ends: list[float], position: list[int], clock: list[float]
) -> list[float] | None:
    """Play on from a position and a time on each device; `ends` holds what is known and is filled up."""
    seconds, source, delay = problem.seconds, problem.source, problem.delay
    left = sum(map(len, rows)) - sum(position)
    able = list(range(len(rows) - 1, -1, -1))
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
                    ends[needed] = _PENDING - 1 - device  # this device waits for it
                    break
                ready += delay[operation]
                if ready > now:
                    now = ready
            now += seconds[operation]
            if ends[operation] < _PENDING:
                able.append(int(_PENDING - 1 - ends[operation]))
            ends[operation] = now
            at += 1
        left -= at - first
        position[device], clock[device] = at, now
    return None if left else ends


def makespan(problem: Problem, rows: Sequence[Row], ends: Sequence[float]) -> float:
    """Return when the last operation ends."""
    return max(ends[row[-1]] for row in rows)


def longest_span(problem: Problem, rows: Sequence[Row], ends: Sequence[float]) -> float:
    """Return the longest time between the first start and the last end of one device."""
    return max(ends[row[-1]] - ends[row[0]] + problem.seconds[row[0]] for row in rows)
