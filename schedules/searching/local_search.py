"""Simulated annealing: moves operations of the critical path to other places in the row of their device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from random import Random

from ..simulation.event_loop import play, replay
from .objectives import Objective
from .problem import Problem, Row

_TOLERANCE = 1e-9


def improve(
    problem: Problem,
    rows: Sequence[Row],
    objective: Objective,
    plays: int,
    random: Random,
    goal: float,
    deadline: float = math.inf,
    heat: float = 0.5,
) -> list[Row]:
    """Return rows at least as good, after simulated annealing.

    Each round moves one operation of the critical path.

    plays: how many rounds.
    goal: the value of the objective at which to stop early.
    deadline: on the clock of `time.monotonic()`.
    heat: the first temperature, in mean lengths of an operation.
    """
    rows = [list(row) for row in rows]
    ends, done = play(problem.table, rows)
    assert done, "the rows to improve must not deadlock"
    value = objective(problem, rows, ends)
    best, best_value = [list(row) for row in rows], value
    critical = _critical(problem, rows, ends)
    hottest = heat * sum(problem.seconds) / problem.operations
    for round_ in range(plays):
        if best_value <= goal * (1 + _TOLERANCE) or (round_ % 64 == 0 and time.monotonic() >= deadline):
            break
        temperature = hottest * (1 - round_ / plays) ** 2
        device, position = critical[random.randrange(len(critical))]
        old = rows[device]
        new = _moved(problem, old, position, random)
        new = _repaired(problem, device, new) if new is not None else None
        if new is None:
            continue
        first = next((at for at, (a, b) in enumerate(zip(old, new, strict=True)) if a != b), 0)
        rows[device] = new
        played, done = replay(problem.table, rows, ends, device, first)
        after = objective(problem, rows, played) if done else math.inf
        worse = after - value
        if not done or (worse > 0 and random.random() >= math.exp(-worse / (temperature + 1e-12))):
            rows[device] = old
            continue
        value, ends = after, played
        critical = _critical(problem, rows, ends)
        if value < best_value - _TOLERANCE:
            best, best_value = [list(row) for row in rows], value
    return best


def _repaired(problem: Problem, device: int, row: Row) -> Row | None:
    """Return the row with W's moved before forwards that have no room; None if that is not enough."""
    room = problem.memory[device] * (1 + _TOLERANCE)
    taken = problem.taken
    level, highest = 0.0, 0.0
    for operation in row:
        level += taken[operation]
        highest = max(highest, level)
    if highest <= room:
        return row
    first_weight = 2 * problem.stages * problem.micro_batches
    stride = problem.stages * problem.micro_batches
    pending: deque[int] = deque()
    brought: set[int] = set()
    repaired: Row = []
    level = 0.0
    for operation in row:
        if operation in brought:
            continue
        while level + taken[operation] > room and pending:
            weight = pending.popleft()
            brought.add(weight)
            repaired.append(weight)
            level += taken[weight]
        if level + taken[operation] > room:
            return None
        level += taken[operation]
        repaired.append(operation)
        if stride <= operation < first_weight:
            pending.append(operation + stride)
        elif operation >= first_weight:
            pending.remove(operation)
    return repaired


def _moved(problem: Problem, row: Row, position: int, random: Random) -> Row | None:
    """Return the row with one operation moved a few places; None if its dependencies forbid that."""
    distance = min(int(random.expovariate(0.5)) + 1, len(row) - 1)
    target = position + (distance if random.random() < 0.5 else -distance)
    if not 0 <= target < len(row):
        return None
    moving = row[position]
    m, stages, stream = problem.micro_batches, problem.stages, problem.stream
    first, last = (target, position) if target < position else (position + 1, target + 1)
    stride = stages * m
    for passed in row[first:last]:
        if stream[passed] == stream[moving] or abs(passed - moving) in (stride, 2 * stride):
            return None
    rest = row[:position] + row[position + 1 :]
    return [*rest[:target], moving, *rest[target:]]


def _critical(problem: Problem, rows: Sequence[Row], ends: Sequence[float]) -> list[tuple[int, int]]:
    """Return device and position of the operations on the critical path, last first."""
    source, delay = problem.source, problem.delay
    device_of, m, stages = problem.device_of, problem.micro_batches, problem.stages
    device = max(range(len(rows)), key=lambda d: ends[rows[d][-1]])
    position = len(rows[device]) - 1
    path = []
    index: dict[int, dict[int, int]] = {}
    while True:
        path.append((device, position))
        operation = rows[device][position]
        before = ends[rows[device][position - 1]] if position else -1.0
        needed = source[operation]
        if needed >= 0 and ends[needed] + delay[operation] > before + _TOLERANCE:
            device = device_of[needed // m % stages]
            if device not in index:
                index[device] = {op: at for at, op in enumerate(rows[device])}
            position = index[device][needed]
        elif position:
            position -= 1
        else:
            return path
