"""The best cut of a chain: each border is reached or not, device by device, in a few passes over all borders."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..bounds.gap_search import RESOLUTION
from ..device_states import Walk
from ..problem import Floats, Ints, Problem, Split
from .windows import SLACK, Windows

# The first bottleneck asked for lies above the bound by this fraction; the next ones by twice as much each.
FIRST_STEP = 1e-3

# A gap of this fraction is not halved any more.
CLOSE = 1e-5


def is_chain(problem: Problem) -> bool:
    """Whether each node follows the one before, and no tensor is touched by others than two neighbours."""
    count = len(problem)
    in_a_row = all(node + 1 in after for node, after in enumerate(problem.successors[: count - 1]))
    return in_a_row and all(net.pins[-1] - net.pins[0] == 1 for net in problem.nets)


def best_of_chain(
    problem: Problem, walk: Walk, low: float, high: float, *, any_will_do: bool
) -> Split | None:
    """The cut of a chain with the smallest bottleneck, or None: nothing fits.

    Args:
        problem: a chain.
        walk: orders of the devices.
        low: seconds that no cut can beat.
        high: seconds that no stage exceeds.
        any_will_do: whether the first cut found is enough.

    A stage ``[a, b)`` pays for both its borders and for no tensor twice, so its load is ``h(b) - g(a)`` with ``h`` the
    running sum of compute plus the border, and ``g`` that sum less the border. Whether ``b`` is reached within T is
    then one comparison with the largest ``g`` of the borders reached before it. Asking takes O(nodes × states ×
    types); a bottleneck is halved in until what is found is proven, and a question that fails says what to ask next.
    """
    chain = _Chain(problem, walk)
    if any_will_do:
        return chain.ask(high, high).split
    step, found = FIRST_STEP, None
    while found is None:
        ask = min(max(low, 1e-300) * (1 + step), high)
        found = chain.ask(ask, ask).split
        if found is None and ask >= high:
            return None
        step *= 2
        low = low if found else ask
    split = found
    high = chain.bottleneck(split)
    while high - low > RESOLUTION * high:
        proof = high * (1 - RESOLUTION)
        ask = proof if high - low <= CLOSE * high else (low + high) / 2
        answer = chain.ask(ask, high)
        if answer.split:
            split, high = answer.split, chain.bottleneck(answer.split)
        else:
            low = high if ask >= proof else max(ask, answer.next_seconds)
    return split


@dataclass(frozen=True)
class _Answer:
    """A cut, or None and the least bottleneck that would have reached one more border."""

    split: Split | None
    next_seconds: float = math.inf


@dataclass(frozen=True)
class _Reached:
    """Borders ``low`` to ``low + len(flags)`` that a state of the walk may reach, and whether it does."""

    low: int
    flags: NDArray[np.bool_]


class _Chain:
    """Running sums of a chain; answers whether a bottleneck is possible."""

    def __init__(self, problem: Problem, walk: Walk) -> None:
        self._problem, self._walk = problem, walk
        count = len(problem)
        border = np.zeros(count + 1)
        for net in problem.nets:
            border[net.pins[1]] += net.seconds
        self._bytes: Ints = np.append(0, np.cumsum(problem.bytes))
        self._memory = walk.free @ np.array(
            [min(kind.memory, int(self._bytes[-1])) for kind in problem.types]
        )
        self._begin: list[Floats] = []
        self._end: list[Floats] = []
        self._first: list[Ints | None] = []
        for kind in problem.types:
            compute = np.append(0.0, np.cumsum(np.where(np.isfinite(kind.seconds), kind.seconds, 0.0)))
            self._begin.append(compute - border if kind.pays else compute)
            self._end.append(compute + border if kind.pays else compute)
            self._first.append(self._first_begin(kind.seconds, kind.memory))
        self._steps: list[list[tuple[int, int]]] = [[] for _ in range(len(walk))]
        for kind, (before, after) in enumerate(walk.moves):
            for state, target in zip(before.tolist(), after.tolist(), strict=True):
                self._steps[state].append((kind, target))

    def _first_begin(self, seconds: Floats, memory: int) -> Ints | None:
        """For each end the first begin of a stage that fits a device; None where all of them fit."""
        banned = ~np.isfinite(seconds)
        if self._bytes[-1] <= memory and not banned.any():
            return None
        behind_banned = np.append(
            0, np.maximum.accumulate(np.where(banned, np.arange(1, len(banned) + 1), 0))
        )
        return np.maximum(np.searchsorted(self._bytes, self._bytes - memory), behind_banned)

    def bottleneck(self, split: Split) -> float:
        """The largest load of any stage."""
        ends = np.append(np.nonzero(np.diff(split.stage_of))[0] + 1, len(self._problem)).tolist()
        begins = [0, *ends[:-1]]
        return max(
            float(self._end[kind][end] - self._begin[kind][begin])
            for begin, end, kind in zip(begins, ends, split.types, strict=True)
        )

    def ask(self, seconds: float, most: float) -> _Answer:
        """A cut of at most ``seconds``; if there is none, what to ask next is right up to ``most`` seconds."""
        lows, highs = self._open(most)
        limit = seconds * (1 + SLACK)
        reached: dict[int, _Reached] = {0: _Reached(0, np.ones(1, dtype=bool))}
        origins: list[list[tuple[int, int]]] = [[] for _ in range(len(self._walk))]
        next_seconds = math.inf
        for state in range(len(self._walk)):
            here = reached.get(state)
            if here is None or not here.flags.any():
                continue
            for kind, target in self._steps[state]:
                if lows[target] >= highs[target]:
                    continue
                if target not in reached:
                    reached[target] = _Reached(
                        lows[target], np.zeros(highs[target] - lows[target], dtype=bool)
                    )
                there = reached[target]
                loads = self._loads(here, there, kind, limit)
                hit = loads <= limit
                there.flags[hit] = True
                next_seconds = min(next_seconds, float(np.where(hit, math.inf, loads).min()))
                origins[target].append((state, kind))
                if hit[-1] and highs[target] > len(self._problem):
                    return _Answer(self._trace(reached, origins, target, limit))
        return _Answer(None, next_seconds)

    def _open(self, seconds: float) -> tuple[list[int], list[int]]:
        """For each state the first border, and the one behind the last, that the devices used and free leave open."""
        windows = Windows(self._problem, self._walk, seconds)
        slack = SLACK * float(windows.mass[-1] + windows.room[0])
        used, behind = windows.room[0] - windows.room + slack, windows.mass[-1] - windows.room - slack
        low = np.maximum(
            np.searchsorted(windows.mass, behind),
            np.searchsorted(self._bytes, self._bytes[-1] - self._memory),
        )
        high = np.minimum(
            np.searchsorted(windows.mass, used, side="right"),
            np.searchsorted(self._bytes, self._memory[0] - self._memory, side="right"),
        )
        return np.maximum(low, 1).tolist(), high.tolist()

    def _loads(self, here: _Reached, there: _Reached, kind: int, limit: float) -> Floats:
        """The least load of a stage from a border reached to each border of the next state, or less where too long.

        No less than the truth where it is within ``limit``.
        """
        begin = np.where(here.flags, self._begin[kind][here.low : here.low + len(here.flags)], -np.inf)
        best = np.maximum.accumulate(begin)
        ends = self._end[kind][there.low : there.low + len(there.flags)]
        # Of the begins here, border ``there.low + i`` has those up to ``start + i`` before it.
        start = there.low - 1 - here.low
        before, upto = min(max(-start, 0), len(ends)), min(max(len(best) - start, 0), len(ends))
        load = ends - best[-1]
        load[:before] = np.inf
        load[before:upto] = ends[before:upto] - best[start + before : start + upto]
        first = self._first[kind]
        if first is None:
            return load
        # The best begin is mostly the last one reached; only where it is too far off the others are looked at.
        where = here.low + np.maximum.accumulate(np.where(begin == best, np.arange(len(best)), 0))
        near = np.nonzero(load <= limit)[0]
        place = np.minimum(start + near, len(best) - 1)
        far = where[place] < first[there.low + near]
        near, place = near[far], place[far]
        if len(near):
            low = np.maximum(first[there.low + near] - here.low, 0)
            load[near] = ends[near] - _range_max(begin, low, place + 1)
        return load

    def _trace(
        self, reached: dict[int, _Reached], origins: list[list[tuple[int, int]]], state: int, limit: float
    ) -> Split:
        end = len(self._problem)
        borders, types = [end], []
        while end:
            state, kind, end = next(
                found
                for before, kind in origins[state]
                if (found := self._origin(reached[before], before, kind, end, limit))
            )
            borders.append(end)
            types.append(kind)
        sizes = -np.diff(borders)[::-1]
        return Split(tuple(np.repeat(np.arange(len(sizes)), sizes).tolist()), tuple(types[::-1]))

    def _origin(
        self, here: _Reached, state: int, kind: int, end: int, limit: float
    ) -> tuple[int, int, int] | None:
        first = self._first[kind]
        low = max(here.low, 0 if first is None else int(first[end]))
        flags = here.flags[low - here.low : max(0, end - here.low)]
        if not flags.any():
            return None
        begin = np.where(flags, self._begin[kind][low : low + len(flags)], -np.inf)
        place = int(begin.argmax())
        return (state, kind, low + place) if self._end[kind][end] - begin[place] <= limit else None


def _range_max(values: Floats, low: Ints, high: Ints) -> Floats:
    """The largest of ``values[low:high]`` for each pair, -inf where that is empty: maxima of runs of powers of two."""
    size = high - low
    result = np.full(len(low), -np.inf)
    table, length = values, 1
    while True:
        mine = np.nonzero((size >= length) & (size < 2 * length))[0]
        result[mine] = np.maximum(table[low[mine]], table[high[mine] - length])
        if not (size >= 2 * length).any():
            return result
        table = np.maximum(table[:-length], table[length:])
        length *= 2
