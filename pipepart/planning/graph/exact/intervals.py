"""The best cut into intervals of one topological order, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..device_states import DeviceStates
from ..problem import Floats, Problem, Split

_Number = TypeVar("_Number", np.float64, np.int64)


def best_intervals(
    problem: Problem, order: Sequence[int], states: DeviceStates, ceiling: float = math.inf
) -> Split | None:
    """Return the cut of ``order`` into intervals with the smallest bottleneck, or None if all exceed ``ceiling``.

    Exact among intervals. ``best[s, a]`` is the smallest bottleneck of the nodes from ``a`` on over the devices that
    are available in state ``s``: a stage ``[a, b)`` on one of them, then ``best`` from ``b`` on over the others. A net
    costs ``[a, b)`` nothing if the interval lies between two consecutive pins or holds all of them. So the transfers
    of all stages that begin at ``a`` are one running sum over ``b``; a step from ``a + 1`` to ``a`` changes it at the
    pins of one node only (interval costs as in Tarnawski et al., NeurIPS 2021, section 4).

    Takes O(nodes × width × states × types), where width is how many nodes a stage of ``ceiling`` seconds can hold.
    """
    count = len(order)
    best = np.full((len(states), count + 1), np.inf)
    best[:, count] = 0.0
    ends = np.zeros((len(states), count), dtype=np.int32)
    taken = np.full((len(states), count), -1, dtype=np.int16)
    stages = _Stages(problem, order)
    for start, crossing in zip(range(count - 1, -1, -1), stages.crossing(), strict=True):
        for index, (before, after) in enumerate(states.transitions):
            load = stages.loads(start, index, crossing, ceiling)
            if not load.size:
                continue
            worst = np.maximum(load, best[:, start + 1 : start + 1 + load.size][after])
            choice = worst.argmin(axis=1)
            value = worst[np.arange(len(before)), choice]
            better = np.nonzero(value < best[before, start])[0]
            improved = before[better]
            best[improved, start] = value[better]
            ends[improved, start] = start + 1 + choice[better]
            taken[improved, start] = index
    if best[0, 0] > ceiling or not math.isfinite(best[0, 0]):
        return None
    return _trace(order, states, ends, taken)


def _trace(
    order: Sequence[int], states: DeviceStates, ends: NDArray[np.int32], taken: NDArray[np.int16]
) -> Split:
    follow = [dict(zip(before.tolist(), after.tolist(), strict=True)) for before, after in states.transitions]
    stage_of = [0] * len(order)
    types = []
    state = start = 0
    while start < len(order):
        end, device_type = int(ends[state, start]), int(taken[state, start])
        for node in order[start:end]:
            stage_of[node] = len(types)
        types.append(device_type)
        state, start = follow[device_type][state], end
    return Split(tuple(stage_of), tuple(types))


class _Stages:
    """Loads of the intervals of an order; ``crossing`` walks from the last start to the first."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self._order, self._types = np.asarray(order), problem.types
        position = np.empty(len(order), dtype=np.int64)
        position[self._order] = np.arange(len(order))
        self._pins = [np.sort(position[list(net.pins)]).tolist() for net in problem.nets]
        self._costs = [net.seconds for net in problem.nets]
        self._nets_at = [[(net, self._pins[net].index(place)) for net in problem.nets_of[node]]
                         for place, node in enumerate(order)]  # fmt: skip
        self._bytes = _running(problem.bytes[self._order])
        finite = [
            np.where(np.isfinite(device_type.seconds), device_type.seconds, 0.0)[self._order]
            for device_type in self._types
        ]
        self._compute = [_running(seconds) for seconds in finite]
        # For each start, the first node from there on that may not run on the type.
        self._wall = [
            _next_true(~np.isfinite(device_type.seconds[self._order])) for device_type in self._types
        ]

    def crossing(self) -> Iterator[Floats]:
        """Yield, for each start, the changes of transfer seconds by end. Their running sum is the cost."""
        steps = np.zeros(len(self._order) + 1)
        for start in range(len(self._order) - 1, -1, -1):
            for net, index in self._nets_at[start]:
                pins, cost = self._pins[net], self._costs[net]
                steps[start + 1] += cost
                if index + 1 < len(pins):
                    steps[pins[index + 1] + 1] -= cost
                if index == 0:
                    steps[pins[-1] + 1] -= cost
            yield steps

    def loads(self, start: int, device_type: int, crossing: Floats, ceiling: float) -> Floats:
        """Return the loads of the stages from ``start`` to each end whose nodes alone stay under ``ceiling``."""
        compute, wall = self._compute[device_type], int(self._wall[device_type][start])
        end = min(
            wall,
            int(np.searchsorted(compute, compute[start] + ceiling, side="right")) - 1,
            int(
                np.searchsorted(
                    self._bytes, self._bytes[start] + self._types[device_type].memory, side="right"
                )
            )
            - 1,
        )
        load = compute[start + 1 : end + 1] - compute[start]
        if self._types[device_type].pays:
            load = load + np.cumsum(crossing[start + 1 : end + 1])
        return load


def _running(values: NDArray[_Number]) -> NDArray[_Number]:
    return np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])


def _next_true(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    places = np.where(flags, np.arange(len(flags)), len(flags))
    return np.minimum.accumulate(places[::-1])[::-1]
