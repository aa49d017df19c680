"""Pairwise testing: a small set of cases that covers every pair of settings."""

import itertools
import random
from collections.abc import Iterable
from typing import Any


def pairwise(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one of each of ``values``, so that every two of different ones are in some row, for parametrize.

    Greedy: of all rows of the product the one with the most pairs that are new, until there are none.
    """
    lists = [list(each) for each in values]
    rows = [tuple(enumerate(row)) for row in itertools.product(*(range(len(each)) for each in lists))]
    random.Random(0).shuffle(rows)
    left = {pair for row in rows for pair in itertools.combinations(row, 2)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(left.intersection(itertools.combinations(row, 2))))
        left.difference_update(itertools.combinations(best, 2))
        chosen.append(best)
    return [tuple(lists[column][index] for column, index in row) for row in sorted(chosen)]
