"""Folds repeated blocks of layers into one line: ``layers.0 – 31, 32 alike``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)(?P<rest>\..*)?")


class Fold(NamedTuple):
    """Consecutive layers that are shown as one.

    label: their names, folded.
    first: index of the first layer.
    layers: how many.
    blocks: how many alike blocks they are.
    """

    label: str
    first: int
    layers: int
    blocks: int


class _Block(NamedTuple):
    stem: str  # the name up to its first number
    number: int  # -1 for a name without a number
    content: tuple[Hashable, ...]  # of each layer, the rest of its name and its kind
    first: int
    names: tuple[str, ...]


def fold(names: Sequence[str], kinds: Sequence[Hashable] = ()) -> list[Fold]:
    """Fold layers in execution order: those of one numbered block, and blocks that are alike and follow each other.

    Args:
        names: of the layers, such as ``"layers.3.attention"``. Their first number is that of the block.
        kinds: of the layers; blocks are alike if kinds and further names are. Left out: names alone decide.

    >>> [each.label for each in fold(["embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "head"])]
    ['embed', 'layers.0 – 1, 2 alike', 'head']
    >>> fold(["0", "1", "2"], ["Conv", "Conv", "ReLU"])
    [Fold(label='0 – 1, 2 alike', first=0, layers=2, blocks=2), Fold(label='2', first=2, layers=1, blocks=1)]
    """
    runs: list[list[_Block]] = []
    for block in _blocks(names, kinds or [""] * len(names)):
        before = runs[-1][-1] if runs else None
        if before and _follows(before, block):
            runs[-1].append(block)
        else:
            runs.append([block])
    return [Fold(_label(run), run[0].first, sum(len(block.names) for block in run), len(run)) for run in runs]


def _blocks(names: Sequence[str], kinds: Sequence[Hashable]) -> Iterator[_Block]:
    parts = [(_NUMBERED.fullmatch(name), name) for name in names]
    keyed = [
        (match["stem"], int(match["number"]), match["rest"] or "") if match else (name, -1, "")
        for match, name in parts
    ]
    for (stem, number), group in groupby(range(len(names)), key=lambda index: keyed[index][:2]):
        own = list(group)
        content = tuple((keyed[index][2], kinds[index]) for index in own)
        yield _Block(stem, number, content, own[0], tuple(names[index] for index in own))


def _follows(before: _Block, block: _Block) -> bool:
    same = before.stem == block.stem and before.content == block.content
    return same and before.number >= 0 and block.number == before.number + 1


def _label(run: Sequence[_Block]) -> str:
    first, last = run[0], run[-1]
    if len(run) > 1:
        return f"{first.stem}{first.number} – {last.number}, {len(run)} alike"
    if len(first.names) == 1:
        return first.names[0]
    return f"{first.stem}{first.number} ({len(first.names)} layers)"
