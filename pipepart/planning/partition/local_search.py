"""Local search over cuts and orders of the devices: move borders, exchange devices, keep what is better."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from schedules.searching.clock import Clock

from ...graph_partition.device_orders import DeviceType
from ..costs.crossings import Borders
from ..costs.stage_memory import Floats, Ints

_STEPS = tuple(sign * step for step in (1, 2, 4, 8, 16, 32) for sign in (1, -1))
_MOST_PAIRED = 8  # borders, up to which every two may move together; above it only those side by side
_EXCHANGES = 64  # of two unlike devices, the most for each step of a climb
_WORTH = 1e-3  # a climb ends where a move gains less, relative to the value
_BEST = 8  # cuts that are returned of those that were all evaluated

# Bytes of memory that the device with the largest deficit lacks (0 or less if all fit), and seconds; smaller is better,
# bytes first. Of cuts [cuts, borders] on orders [cuts, rows].
Evaluate = Callable[[Borders, Ints], tuple[Floats, Floats]]


@dataclass(frozen=True)
class EvaluatedCut:
    """A cut on an order of the devices, with its value.

    Attributes:
        deficit: bytes that the device with the largest deficit lacks; 0 if all fit.
        seconds: of a step, or whatever is to be small.
        borders: the first layer of each stage but the first.
        order: the device of each schedule row, by its position in the cluster.
    """

    deficit: float
    seconds: float
    borders: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def value(self) -> tuple[float, float]:
        """The deficit, then the seconds: smaller is better."""
        return self.deficit, self.seconds


class LocalSearch:
    """Searches cuts of a chain, on orders of the devices, with small values.

    Args:
        rows: the schedule row of each stage.
        allowed: the borders that a cut may have, increasing.
        keep: removes cuts that constraints forbid.
        types: of the devices; alike ones are not exchanged.
        evaluate: gives the values.
        most: cuts to evaluate.
        clock: after which nothing more is evaluated.
    """

    def __init__(
        self,
        rows: Sequence[int],
        allowed: Ints,
        keep: Callable[[Borders], np.ndarray],
        types: Sequence[DeviceType],
        evaluate: Evaluate,
        most: int,
        clock: Clock,
    ) -> None:
        self._rows, self._allowed, self._keep = np.array(rows), allowed, keep
        self._type_of = {device: number for number, kind in enumerate(types) for device in kind.devices}
        self._types, self._evaluate, self._left, self._clock = types, evaluate, most, clock

    def best_of_all(self, orders: Sequence[tuple[int, ...]]) -> list[EvaluatedCut]:
        """Evaluate every cut on each of the orders; return the best ones, the best first."""
        inner = len(self._rows) - 1
        cuts = list(itertools.combinations(self._allowed.tolist(), inner))
        borders = np.array(cuts, dtype=np.int64).reshape(len(cuts), inner)
        table = np.repeat(np.array(orders, dtype=np.int64), len(borders), axis=0)
        return self.evaluated(np.tile(borders, (len(orders), 1)), table)

    def climb(self, start: EvaluatedCut) -> list[EvaluatedCut]:
        """Replace the start by its best neighbour until none is better; return all of these, the last one first."""
        passed = [start]
        while self._left > 0 and not self._clock.is_over:
            here = passed[0]
            found = self.evaluated(*self._neighbours(here))
            if not found or found[0].deficit > here.deficit:
                break
            if found[0].deficit == here.deficit and found[0].seconds >= here.seconds * (1 - _WORTH):
                break
            passed.insert(0, found[0])
        return passed

    def evaluated(self, borders: Borders, orders: Ints) -> list[EvaluatedCut]:
        """Return the best of some cuts that the constraints allow, the best first."""
        kept = self._keep(borders)
        borders, orders = borders[kept], orders[kept]
        if not len(borders):
            return []
        self._left -= len(borders)
        deficits, seconds = self._evaluate(borders, orders)
        deficits = np.maximum(deficits, 0.0)
        best = np.lexsort((seconds, deficits))[:_BEST]
        return [
            EvaluatedCut(
                float(deficits[at]), float(seconds[at]), tuple(borders[at].tolist()), tuple(orders[at].tolist())
            )
            for at in best
        ]  # fmt: skip

    def _neighbours(self, here: EvaluatedCut) -> tuple[Borders, Ints]:
        """Return the cuts with a border or two moved, and the orders with two unlike devices exchanged."""
        places = np.searchsorted(self._allowed, here.borders)
        first, first_step, second, second_step = _moves(len(places))[: self._left].T
        moved, row = np.tile(places, (len(first), 1)), np.arange(len(first))
        moved[row, first] += first_step
        moved[row, second] += second_step
        inside = (moved >= 0).all(axis=1) & (moved < len(self._allowed)).all(axis=1)
        inside &= (np.diff(moved, axis=1) > 0).all(axis=1)
        tables = [self._allowed[moved[inside]]]
        orders = [np.repeat(np.array([here.order]), len(tables[0]), axis=0)]
        for order, rows in itertools.islice(self._exchanged(here.order), _EXCHANGES):
            resized = self._with_lengths_exchanged(places, rows) if len(rows) == 2 else None
            near = [here.borders] if resized is None else [here.borders, resized]
            tables.append(np.array(near, dtype=np.int64).reshape(len(near), -1))
            orders.append(np.repeat(np.array([order]), len(near), axis=0))
        return np.concatenate(tables)[: self._left], np.concatenate(orders)[: self._left]

    def _exchanged(self, order: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield orders with two unlike devices exchanged, near ones first, or one replaced; and the changed rows."""
        type_of, used = self._type_of, set(order)
        for distance in range(1, len(order)):
            for row in range(len(order) - distance):
                other = row + distance
                if type_of[order[row]] != type_of[order[other]]:
                    changed = list(order)
                    changed[row], changed[other] = order[other], order[row]
                    yield tuple(changed), (row, other)
        if len(used) == len(type_of):
            return
        spare = [next((one for one in kind.devices if one not in used), None) for kind in self._types]
        for row, device in enumerate(order):
            for number, other in enumerate(spare):
                if other is not None and number != type_of[device]:
                    yield (*order[:row], other, *order[row + 1 :]), (row,)

    def _with_lengths_exchanged(self, places: Ints, rows: tuple[int, ...]) -> Ints | None:
        """Return the borders with the lengths of the stages of two rows exchanged; None if they stay as they are."""
        lengths = np.diff([-1, *places.tolist(), len(self._allowed)])
        one, other = (np.flatnonzero(self._rows == row) for row in rows)
        if len(one) != len(other) or (lengths[one] == lengths[other]).all():
            return None
        lengths[one], lengths[other] = lengths[other], lengths[one].copy()
        return self._allowed[np.cumsum(lengths)[:-1] - 1]


@lru_cache(64)
def _moves(count: int) -> Ints:
    """[moves, 4]: a border and how many allowed borders it moves on, then another one; short moves come first."""
    moves = [(border, step, border, 0) for step in _STEPS for border in range(count)]
    borders = range(count)
    pairs = itertools.combinations(borders, 2) if count <= _MOST_PAIRED else itertools.pairwise(borders)
    moves += [(one, a, other, b) for one, other in pairs for a in (-1, 1) for b in (-1, 1)]
    return np.array(moves, dtype=np.int64).reshape(len(moves), 4)


def proportional_borders(sums: Floats, allowed: Ints, speeds: Sequence[float]) -> Ints:
    """Return the borders of stages whose seconds are in proportion to the speeds of their devices.

    Args:
        sums: running sums of the seconds of layers, from 0.0 on.
        allowed: the borders that a cut may have, at least as many as it has.
        speeds: of the device of each stage.
    """
    inner = len(speeds) - 1
    shares = np.cumsum(speeds)
    places = np.searchsorted(sums[allowed], shares[:-1] / shares[-1] * sums[-1])
    index = np.arange(inner)
    places = np.maximum.accumulate(places - index) + index  # strictly increasing
    return allowed[np.minimum(places, len(allowed) - inner + index)]
