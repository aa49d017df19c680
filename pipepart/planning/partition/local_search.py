"""Local search over cuts and orders of the devices: moves borders and exchanges devices while the cut improves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from schedules.searching.clock import Clock

from ...graph_partition.device_orders import DeviceType
from ..costs.cut_costs import Borders
from ..costs.stage_memory import Floats, Ints

_STEPS = tuple(sign * step for step in (1, 2, 4, 8, 16, 32) for sign in (1, -1))
_MOST_EXCHANGES = 64  # exchanges of two unlike devices to try in each step of a climb
_LEAST_GAIN = 1e-3  # a climb ends if a move shortens the seconds by a smaller share

# Evaluates cuts [cuts, borders] on orders [cuts, rows]. Returns the largest memory deficit of any device in bytes (0 or
# less if all fit) and the seconds: each [cuts]. Smaller is better, bytes first.
Evaluate = Callable[[Borders, Ints], tuple[Floats, Floats]]


@dataclass(frozen=True)
class EvaluatedCut:
    """A cut and an order of the devices, with their value.

    Attributes:
        deficit: the largest memory deficit of any device in bytes; 0 if all fit.
        seconds: the seconds of a step.
        borders: the first layer of each stage but the first.
        order: the device of each schedule row, by its position in the cluster.
    """

    deficit: float
    seconds: float
    borders: tuple[int, ...]
    order: tuple[int, ...]


class LocalSearch:
    """Searches cuts of a chain and orders of the devices with small values.

    Args:
        rows: the schedule row of each stage.
        allowed: the borders that a cut may have, increasing.
        types: the types of the devices; devices of the same type are not exchanged.
        evaluate: computes the values of cuts.
        most: the largest number of cuts to evaluate.
        clock: ends a climb.
    """

    def __init__(
        self,
        rows: Sequence[int],
        allowed: Ints,
        types: Sequence[DeviceType],
        evaluate: Evaluate,
        most: int,
        clock: Clock,
    ) -> None:
        self._rows, self._allowed = np.array(rows), allowed
        self._type_of = {device: number for number, kind in enumerate(types) for device in kind.devices}
        self._types, self._evaluate, self._left, self._clock = types, evaluate, most, clock

    def best_of_all(self, orders: Sequence[tuple[int, ...]]) -> EvaluatedCut | None:
        """Evaluate every cut on each of the orders; return the best."""
        inner = len(self._rows) - 1
        cuts = list(itertools.combinations(self._allowed.tolist(), inner))
        borders = np.array(cuts, dtype=np.int64).reshape(len(cuts), inner)
        table = np.repeat(np.array(orders, dtype=np.int64), len(borders), axis=0)
        return self.best_of(np.tile(borders, (len(orders), 1)), table)

    def climb(self, here: EvaluatedCut) -> EvaluatedCut:
        """Move to the best neighbour until no neighbour is better; return the last cut."""
        while self._left > 0 and not self._clock.is_over:
            best = self.best_of(*self._neighbours(here))
            if best is None or best.deficit > here.deficit:
                break
            if best.deficit == here.deficit and best.seconds >= here.seconds * (1 - _LEAST_GAIN):
                break
            here = best
        return here

    def best_of(self, borders: Borders, orders: Ints) -> EvaluatedCut | None:
        """Evaluate cuts; return the best of them, or None if there are none."""
        if not len(borders):
            return None
        self._left -= len(borders)
        deficits, seconds = self._evaluate(borders, orders)
        deficits = np.maximum(deficits, 0.0)
        at = np.lexsort((seconds, deficits))[0]
        return EvaluatedCut(
            float(deficits[at]), float(seconds[at]), tuple(borders[at].tolist()), tuple(orders[at].tolist())
        )

    def _neighbours(self, here: EvaluatedCut) -> tuple[Borders, Ints]:
        """Return the neighbours of a cut: one or two borders moved, or devices exchanged or replaced."""
        places = np.searchsorted(self._allowed, here.borders)
        first, first_step, second, second_step = _moves(len(places))[: self._left].T
        moved, row = np.tile(places, (len(first), 1)), np.arange(len(first))
        moved[row, first] += first_step
        moved[row, second] += second_step
        inside = (moved >= 0).all(axis=1) & (moved < len(self._allowed)).all(axis=1)
        inside &= (np.diff(moved, axis=1) > 0).all(axis=1)
        tables = [self._allowed[moved[inside]]]
        orders = [np.repeat(np.array([here.order]), len(tables[0]), axis=0)]
        for order in itertools.islice(self._exchanged(here.order), _MOST_EXCHANGES):
            tables.append(np.array([here.borders], dtype=np.int64))
            orders.append(np.array([order]))
        return np.concatenate(tables)[: self._left], np.concatenate(orders)[: self._left]

    def _exchanged(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield orders with two unlike devices exchanged (near rows first) or a device replaced."""
        type_of, used = self._type_of, set(order)
        for distance in range(1, len(order)):
            for row in range(len(order) - distance):
                other = row + distance
                if type_of[order[row]] != type_of[order[other]]:
                    changed = list(order)
                    changed[row], changed[other] = order[other], order[row]
                    yield tuple(changed)
        if len(used) == len(type_of):
            return
        unused = [next((index for index in kind.devices if index not in used), None) for kind in self._types]
        for row, device in enumerate(order):
            for number, replacement in enumerate(unused):
                if replacement is not None and number != type_of[device]:
                    yield *order[:row], replacement, *order[row + 1 :]


@lru_cache(8)
def _moves(count: int) -> Ints:
    """Return moves of a border, or of two neighbours, short moves first: [moves, 4].

    A move is a border and its steps, then a second border and its steps.
    """
    moves = [(border, step, border, 0) for step in _STEPS for border in range(count)]
    pairs = itertools.pairwise(range(count))
    moves += [(first, a, second, b) for first, second in pairs for a in (-1, 1) for b in (-1, 1)]
    return np.array(moves, dtype=np.int64).reshape(len(moves), 4)


def proportional_borders(sums: Floats, allowed: Ints, speeds: Sequence[float]) -> Ints:
    """Return the allowed borders nearest to stages whose seconds are in proportion to the speeds of their devices.

    Args:
        sums: running sums of the seconds of layers, from 0.0 on: [layers + 1].
        allowed: the borders that a cut may have, at least as many as it has.
        speeds: the speed of the device of each stage.
    """
    inner = len(speeds) - 1
    if not inner:
        return allowed[:0]
    shares = np.cumsum(speeds)
    targets = shares[:-1] / shares[-1] * sums[-1]
    places = np.searchsorted(sums[allowed], targets)
    before, behind = (np.clip(at, 0, len(allowed) - 1) for at in (places - 1, places))
    is_before = np.abs(sums[allowed[before]] - targets) < np.abs(sums[allowed[behind]] - targets)
    index = np.arange(inner)
    places = np.maximum.accumulate(np.where(is_before, before, behind) - index) + index  # strictly increasing
    return allowed[np.minimum(places, len(allowed) - inner + index)]
