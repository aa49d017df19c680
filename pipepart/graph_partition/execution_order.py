"""Cuts the execution order into intervals: the best cut, or even shares of the work if there is no time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from schedules.searching.clock import Clock

from .intervals import best_intervals
from .problem import Floats, Problem, Split


def best_interval_split(problem: Problem, clock: Clock, ceiling: float = math.inf) -> Split | None:
    """Return the cut of the execution order with the smallest bottleneck, or None if all exceed ``ceiling``.

    Exact for cuts into intervals, by dynamic programming in O(nodes × width × device states × types). The width is the
    number of nodes that a stage of ``ceiling`` seconds can contain.
    """
    best = best_intervals(problem.orders, len(problem), _stage_loads(problem, clock, ceiling))
    if best.value > ceiling or not math.isfinite(best.value):
        return None
    firsts, types = best.stages()
    sizes = np.diff([*firsts, len(problem)])
    return Split(tuple(np.repeat(np.arange(len(firsts)), sizes).tolist()), types)


def even_split(problem: Problem) -> Split | None:
    """Return the cut of the execution order that gives each device its share of the work, or None if it does not fit.

    Devices are filled in the order of their types. A node goes to the next device that may run it, has memory for it,
    and has less work than its share.
    """
    weights = problem.device_weights
    devices = [kind for kind, device_type in enumerate(problem.types) for _ in device_type.devices]
    share = float(problem.work.sum()) / sum(float(weights[kind]) for kind in devices)
    stage_of: list[int] = []
    device, work, size = 0, 0.0, 0
    for node in range(len(problem)):
        while device < len(devices):
            kind = problem.types[devices[device]]
            fits = np.isfinite(kind.seconds[node]) and size + int(problem.bytes[node]) <= kind.memory
            # The last device may exceed its share, by rounding.
            has_time = work < share * float(weights[devices[device]]) or device + 1 == len(devices)
            if fits and has_time:
                break
            device, work, size = device + 1, 0.0, 0
        else:
            return None
        stage_of.append(device)
        work += float(problem.work[node])
        size += int(problem.bytes[node])
    used = sorted(set(stage_of))
    return Split(tuple(used.index(stage) for stage in stage_of), tuple(devices[stage] for stage in used))


def _stage_loads(problem: Problem, clock: Clock, ceiling: float) -> Iterator[tuple[int, Floats]]:
    """Yield each first node, from the last to the first, with the loads of the stages that start there, [edges, ends].

    Only stages whose compute is at most ``ceiling`` seconds are included. A load is infinite if a node is banned from
    the device or the bytes do not fit.
    """
    nodes, types = len(problem), problem.types
    size = _running(problem.bytes)
    allowed = [np.isfinite(kind.seconds) for kind in types]
    compute = [_running(np.where(ok, kind.seconds, 0.0)) for kind, ok in zip(types, allowed, strict=True)]
    # For each start and type, the first node from there on that may not run on the type.
    walls = [np.where(ok, nodes, np.arange(nodes)) for ok in allowed]
    walls = [np.minimum.accumulate(wall[::-1])[::-1] for wall in walls]
    for start, steps in zip(range(nodes - 1, -1, -1), _transfer_steps(problem), strict=True):
        clock.check()
        loads = []
        for kind, seconds, wall in zip(types, compute, walls, strict=True):
            end = min(
                int(wall[start]),
                int(np.searchsorted(seconds, seconds[start] + ceiling, side="right")) - 1,
                int(np.searchsorted(size, size[start] + kind.memory, side="right")) - 1,
            )
            load = seconds[start + 1 : end + 1] - seconds[start]
            loads.append(load + np.cumsum(steps[start + 1 : end + 1]) if kind.pays else load)
        table = np.full((len(types), max(map(len, loads))), np.inf)
        for row, load in zip(table, loads, strict=True):
            row[: len(load)] = load
        yield start, table[problem.orders.type] if len(types) > 1 else table


def _transfer_steps(problem: Problem) -> Iterator[Floats]:
    """Yield, for each first node from the last to the first, the change of the transfers from each end to the next.

    A net costs ``[a, b)`` nothing if the interval lies between two consecutive pins or holds all of them. So the
    transfers of all stages that begin at ``a`` are a running sum over ``b``. From ``a + 1`` to ``a``, the summands only
    change at pins of the nets of node ``a`` (as in Tarnawski et al., NeurIPS 2021, section 4).
    """
    steps = np.zeros(len(problem) + 1)
    for start in range(len(problem) - 1, -1, -1):
        for number in problem.nets_of[start]:
            pins, cost = problem.nets[number].pins, problem.nets[number].seconds
            index = bisect_left(pins, start)
            steps[start + 1] += cost
            if index + 1 < len(pins):
                steps[pins[index + 1] + 1] -= cost
            if index == 0:
                steps[pins[-1] + 1] -= cost
        yield steps


def _running(values: NDArray) -> NDArray:
    return np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])
