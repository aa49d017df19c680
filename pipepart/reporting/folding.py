"""Groups repeated blocks of layers into one table row: ``layers.0 – 31, 32 alike``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

FEWEST_ALIKE = 4  # blocks that are worth folding
_MOST_PIECES = 4  # of a span
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)(?P<rest>\..*)?")
_LONGEST_PATTERN = 8  # blocks that repeat together, as linear and activation in turns


class Fold(NamedTuple):
    """Consecutive layers that are shown in one row.

    label: their names, folded.
    first: index of the first layer.
    layers: how many.
    blocks: how many alike blocks, or alike groups of blocks, they are.
    """

    label: str
    first: int
    layers: int
    blocks: int


class _Block(NamedTuple):
    stem: str  # the name up to its first number
    number: int  # -1 for a name without a number
    content: tuple[tuple[str, Hashable], ...]  # of each layer, the rest of its name and its kind
    first: int
    names: tuple[str, ...]


def fold(names: Sequence[str], kinds: Sequence[Hashable] = ()) -> list[Fold]:
    """Group layers in execution order: the layers of one numbered block, and consecutive blocks that are alike.

    Groups of up to 8 blocks that repeat are folded, too. A block that is not repeated is searched for blocks within it.

    Args:
        names: of the layers, such as ``"layers.3.attention"``. Their first number is that of the block.
        kinds: of the layers; blocks are alike if kinds and further names are. Left out: names alone decide.

    >>> [each.label for each in fold(["embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "head"])]
    ['embed', 'layers.0 – 1, 2 alike', 'head']
    >>> fold(["0", "1", "2"], ["Conv", "Conv", "ReLU"])
    [Fold(label='0 – 1, 2 alike', first=0, layers=2, blocks=2), Fold(label='2', first=2, layers=1, blocks=1)]
    >>> [each.label for each in fold(["0", "1", "2", "3", "4"], ["Linear", "ReLU", "Linear", "ReLU", "Linear"])]
    ['0 – 3, 2 × 2 alike', '4']
    >>> [each.label for each in fold(["body.0.layers.0", "body.0.layers.1", "body.1.pool"])]
    ['body.0.layers.0 – 1, 2 alike', 'body.1.pool']
    """
    return _fold(names, kinds or [""] * len(names), "", 0)


def span(names: Sequence[str], kinds: Sequence[Hashable] = ()) -> str:
    """Return a short text for the layers of a stage: alike blocks as one item, other layers as first – last.

    Args:
        names: of consecutive layers.
        kinds: as for :func:`fold`.

    >>> span(["embed", "drop", *(f"h.{block}" for block in range(6)), "norm", "head"])
    'embed – drop; h.0 – 5, 6 alike; norm – head'
    >>> span(["h.0.attention", "h.0.mlp", "h.1.attention"]), span(["norm"])
    ('h.0.attention – 1.attention', 'norm')
    """
    pieces, at = [], 0
    for each in fold(names, kinds):
        if each.blocks < FEWEST_ALIKE:
            continue
        pieces += [*([_between(names[at : each.first])] if at < each.first else []), each.label]
        at = each.first + each.layers
    pieces += [_between(names[at:])] if at < len(names) else []
    return "; ".join(pieces) if len(pieces) <= _MOST_PIECES else _between(names)


def _between(names: Sequence[str]) -> str:
    """Name the first and the last layer; what their names begin with stands once."""
    first, last = names[0], names[-1]
    if first == last:
        return first
    parts = last.split(".")
    shared = 0
    for one, other in zip(first.split("."), parts[:-1], strict=False):
        if one != other:
            break
        shared += 1
    return f"{first} – {'.'.join(parts[shared:])}"


def _fold(names: Sequence[str], kinds: Sequence[Hashable], prefix: str, offset: int) -> list[Fold]:
    """Fold the layers from index ``offset`` on, whose names begin with a prefix that is left out in ``names``."""
    blocks, found, at = list(_blocks(names, kinds)), [], 0
    while at < len(blocks):
        period, times = _repeated(blocks, at)
        run = blocks[at : at + period * times]
        at += len(run)
        layers = sum(len(block.names) for block in run)
        first = run[0].first
        if times == 1 and layers > 1:
            rests = [rest for rest, _ in run[0].content]
            inner_prefix = f"{prefix}{run[0].stem}{run[0].number}"
            inner = _fold(rests, kinds[first : first + layers], inner_prefix, offset + first)
            if any(each.blocks > 1 for each in inner):
                found += inner
                continue
        found.append(Fold(prefix + _label(run, period, times), offset + first, layers, times))
    return found


def _repeated(blocks: Sequence[_Block], at: int) -> tuple[int, int]:
    """Return the length of the pattern that begins at a block, and how often it is there; (1, 1) for no pattern."""
    best = 1, 1
    for period in range(1, _LONGEST_PATTERN + 1):
        end = at + 1
        while end < len(blocks) and _follows(blocks[end - 1], blocks[end]):
            if end - at >= period and blocks[end].content != blocks[end - period].content:
                break
            end += 1
        times = (end - at) // period
        # The shortest pattern of those that cover the most.
        if times > 1 and period * times > best[0] * best[1]:
            best = period, times
    return best


def _follows(before: _Block, block: _Block) -> bool:
    return before.stem == block.stem and 0 <= before.number == block.number - 1


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


def _label(run: Sequence[_Block], period: int, times: int) -> str:
    first, last = run[0], run[-1]
    if times > 1:
        each = f"{times} × {period}" if period > 1 else str(times)
        return f"{first.stem}{first.number} – {last.number}, {each} alike"
    if len(first.names) == 1:
        return first.names[0]
    return f"{first.stem}{first.number} ({len(first.names)} layers)"
