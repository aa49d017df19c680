"""Local search over the cuts of a chain: the neighbours of a cut, and climbing from a cut to a better neighbour."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Cut = TypeVar("_Cut")

_MOST_PAIRED = 8  # borders, up to which every two may move together; above it only those side by side


def climb(start: _Cut, better: Callable[[_Cut], _Cut | None]) -> _Cut:
    """Replace a cut by a better neighbour until there is none. ``better`` returns one, or None."""
    while (found := better(start)) is not None:
        start = found
    return start


def neighbours(
    borders: NDArray[np.int64], allowed: NDArray[np.int64], steps: Sequence[int], pair_steps: Sequence[int]
) -> NDArray[np.int64]:
    """Return the cuts with one or two borders moved: [cuts, borders].

    Args:
        borders: of the cut, increasing.
        allowed: the borders that a cut may have, increasing. A step leads from one of them to the next.
        steps: moves of a single border.
        pair_steps: moves of two borders at a time.
    """
    moves = _moves(len(borders), tuple(steps), tuple(pair_steps))
    table = np.searchsorted(allowed, borders) + moves
    inside = (table >= 0).all(axis=1) & (table < len(allowed)).all(axis=1)
    inside &= (np.diff(table, axis=1) > 0).all(axis=1)
    return allowed[table[inside]]


@lru_cache(256)
def _moves(count: int, steps: tuple[int, ...], pair_steps: tuple[int, ...]) -> NDArray[np.int64]:
    """[moves, borders]: how far each move takes each of ``count`` borders."""
    one = np.eye(count, dtype=np.int64)
    pairs = itertools.combinations(one, 2) if count <= _MOST_PAIRED else itertools.pairwise(one)
    moves = [step * row for row in one for step in steps]
    moves += [a * first + b * second for first, second in pairs for a in pair_steps for b in pair_steps]
    return np.array(moves, dtype=np.int64).reshape(len(moves), count)
