"""Plays rows of operations: when each ends; what search runs thousands of times."""

from __future__ import annotations

from collections.abc import Sequence

from .problem import Problem, Row

_PENDING = -1.0


def play(problem: Problem, rows: Sequence[Row]) -> list[float] | None:
    """Return when each operation ends, each device as early as it can in the order of its row; None on deadlock."""
    seconds, source, delay = problem.seconds, problem.source, problem.delay
    ends = [_PENDING] * problem.operations
    position = [0] * len(rows)
    clock = [0.0] * len(rows)
    able = list(range(len(rows) - 1, -1, -1))
    left = problem.operations
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
