"""Simulated annealing of an order: moves critical operations to other positions on their device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from random import Random

from .allowance import Allowance
from .objectives import Objective
from .playing import play
from .problem import SLACK, Problem, Row

_TOLERANCE = 1e-9  # relative to the objective
_FIRST_TEMPERATURE = 0.5  # mean seconds of an operation
# Work of a round in operations of the allowance: a constant, and a part for each operation that is played.
_WORK_PER_ROUND, _WORK_PER_PLAYED = 15, 0.15


def round_work(problem: Problem) -> float:
    """Return the mean work of one round of :func:`anneal_order`, in operations of the allowance."""
    return _WORK_PER_ROUND + _WORK_PER_PLAYED * problem.operations


def anneal_order(
    problem: Problem,
    rows: Sequence[Row],
    objective: Objective,
    rounds: int,
    random: Random,
    goal: float,
    allowance: Allowance,
) -> list[Row]:
    """Improve an order by simulated annealing; the objective of the result is never worse.

    Each round moves one operation of the critical path.

    Args:
        problem: the operations.
        rows: the operations of each device, in the order to start from.
        objective: to minimise.
        rounds: number of rounds, unless the allowance ends before.
        random: draws the moves.
        goal: stop at this value of the objective.
        allowance: to count the work in.
    """
    rows = [list(row) for row in rows]
    ends = play(problem, rows)
    assert ends is not None, "the rows to improve must not deadlock"
    value = objective(problem, rows, ends)
    best, best_value = [list(row) for row in rows], value
    critical = _critical(problem, rows, ends, objective)
    hottest = _FIRST_TEMPERATURE * sum(problem.seconds) / problem.operations
    work = round_work(problem)
    for number in range(rounds):
        if best_value <= goal * (1 + _TOLERANCE) or allowance.is_over:
            break
        allowance.spend(work)
        temperature = hottest * (1 - number / rounds) ** 2
        device, position = critical[random.randrange(len(critical))]
        old = rows[device]
        new = _moved(problem, old, position, random)
        new = _repaired(problem, device, new) if new is not None else None
        if new is None:
            continue
        rows[device] = new
        played = play(problem, rows)
        after = math.inf if played is None else objective(problem, rows, played)
        if played is None or after - value > temperature * -math.log(1 - random.random()):
            rows[device] = old
            continue
        value, ends = after, played
        critical = _critical(problem, rows, ends, objective)
        if value < best_value * (1 - _TOLERANCE):
            best, best_value = [list(row) for row in rows], value
    return best


def _repaired(problem: Problem, device: int, row: Row) -> Row | None:
    """Move W's before forwards that exceed the memory; return None if the row still does not fit."""
    if problem.memory is None:
        return row
    room = problem.memory.limit[device] * SLACK
    added = problem.taken
    level, highest = 0.0, 0.0
    for operation in row:
        level += added[operation]
        highest = max(highest, level)
    if highest <= room:
        return row
    stride = problem.stages * problem.micro_batches
    first_weight = 2 * stride
    pending: deque[int] = deque()
    moved_weights: set[int] = set()
    repaired: Row = []
    level = 0.0
    for operation in row:
        if operation in moved_weights:
            continue
        while level + added[operation] > room and pending:
            weight = pending.popleft()
            moved_weights.add(weight)
            repaired.append(weight)
            level += added[weight]
        if level + added[operation] > room:
            return None
        level += added[operation]
        repaired.append(operation)
        if stride <= operation < first_weight:
            pending.append(operation + stride)
        elif operation >= first_weight:
            pending.remove(operation)
    return repaired


def _moved(problem: Problem, row: Row, position: int, random: Random) -> Row | None:
    """Move one operation by a random distance; return None if that violates its dependencies."""
    distance = min(int(random.expovariate(0.5)) + 1, len(row) - 1)
    target = position + (distance if random.random() < 0.5 else -distance)
    if not 0 <= target < len(row):
        return None
    moving = row[position]
    stream, stride = problem.stream, problem.stages * problem.micro_batches
    first, last = (target, position) if target < position else (position + 1, target + 1)
    for passed in row[first:last]:
        if stream[passed] == stream[moving] or abs(passed - moving) in (stride, 2 * stride):
            return None
    rest = row[:position] + row[position + 1 :]
    return [*rest[:target], moving, *rest[target:]]


def _critical(
    problem: Problem, rows: Sequence[Row], ends: Sequence[float], objective: Objective
) -> list[tuple[int, int]]:
    """Return (device, position) of each operation on the critical path of the worst device, last operation first."""
    device_of, m, stages = problem.device_of, problem.micro_batches, problem.stages
    before = problem.recompute_before or [0.0] * problem.operations
    used = [device for device, row in enumerate(rows) if row]
    device = max(used, key=lambda device: objective(problem, [rows[device]], ends))
    position = len(rows[device]) - 1
    tolerance = _TOLERANCE * ends[rows[device][-1]]
    path = []
    index: dict[int, dict[int, int]] = {}
    while True:
        path.append((device, position))
        operation = rows[device][position]
        needed = problem.source[operation]
        start = ends[operation] - problem.seconds[operation]
        free = ends[rows[device][position - 1]] if position else -1.0
        if needed >= 0 and start > free + before[operation] + tolerance:
            device = device_of[needed // m % stages]
            if device not in index:
                index[device] = {op: at for at, op in enumerate(rows[device])}
            position = index[device][needed]
        elif position:
            position -= 1
        else:
            return path
