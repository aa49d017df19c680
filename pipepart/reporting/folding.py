"""Groups repeated blocks of layers into one table row: ``layers.0 – 31, 32 alike``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

_FEWEST_ALIKE = 4  # repetitions that are worth folding
_LONGEST_BLOCK = 16  # layers that repeat together
_MOST_PIECES = 4  # of a span


class Fold(NamedTuple):
    """Consecutive layers that are shown in one row.

    label: their names, folded.
    first: index of the first layer.
    layers: how many.
    """

    label: str
    first: int
    layers: int


def fold(names: Sequence[str], kinds: Sequence[Hashable] = ()) -> list[Fold]:
    """Group layers in execution order: four or more blocks that are alike, each other layer by itself.

    Args:
        names: of the layers, such as ``"layers.3.attention"``.
        kinds: of the layers. Blocks are alike if their kinds, and their names without numbers, are. Left out: names
            alone decide.

    >>> [each.label for each in fold(["embed", *(f"layers.{n}.{part}" for n in range(9) for part in "ab"), "head"])]
    ['embed', 'layers.0.a – 8.b, 9 × 2 alike', 'head']
    >>> fold(["0", "1", "2", "3", "4"], ["Conv"] * 4 + ["ReLU"])
    [Fold(label='0 – 3, 4 alike', first=0, layers=4), Fold(label='4', first=4, layers=1)]
    """
    signs = [
        (re.sub(r"\d+", "#", name), kind)
        for name, kind in zip(names, kinds or [""] * len(names), strict=True)
    ]
    folds, at = [], 0
    while at < len(names):
        block, times = _repeated(signs, at)
        layers = block * times
        label = names[at]
        if times > 1:
            each = f"{times} × {block}" if block > 1 else str(times)
            label = f"{_between(names[at : at + layers])}, {each} alike"
        folds.append(Fold(label, at, layers))
        at += layers
    return folds


def span(names: Sequence[str], kinds: Sequence[Hashable] = ()) -> str:
    """Return a short text for the layers of a stage: alike blocks as one item, other layers as first – last.

    Args:
        names: of consecutive layers.
        kinds: as for :func:`fold`.

    >>> span(["embed", "drop", *(f"h.{block}" for block in range(6)), "norm", "head"])
    'embed – drop; h.0 – 5, 6 alike; norm – head'
    """
    pieces, at = [], 0
    for each in (*(run for run in fold(names, kinds) if run.layers > 1), Fold("", len(names), 0)):
        pieces += [_between(names[at : each.first])] if at < each.first else []
        pieces += [each.label] if each.layers else []
        at = each.first + each.layers
    return "; ".join(pieces) if len(pieces) <= _MOST_PIECES else _between(names)


def _repeated(signs: Sequence[Hashable], at: int) -> tuple[int, int]:
    """Return the length of the block that begins at a layer, and how often it is there; (1, 1) for less than four."""
    best = 1, 1
    for block in range(1, _LONGEST_BLOCK + 1):
        end = at + block
        while end < len(signs) and signs[end] == signs[end - block]:
            end += 1
        times = (end - at) // block
        # The shortest block of those that cover the most.
        if times >= _FEWEST_ALIKE and block * times > best[0] * best[1]:
            best = block, times
    return best


def _between(names: Sequence[str]) -> str:
    """Name the first and the last layer; what their names begin with stands once."""
    first, last = names[0], names[-1]
    if first == last:
        return first
    parts = last.split(".")
    shared = 0
    for left, right in zip(first.split("."), parts[:-1], strict=False):
        if left != right:
            break
        shared += 1
    return f"{first} – {'.'.join(parts[shared:])}"
