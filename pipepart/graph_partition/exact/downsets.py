"""Downsets: the sets of nodes that can lie before a border between two stages, as rows of bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedules.searching.clock import Clock

from ..problem import Floats, Ints, Problem
from .capacity import Capacity
from .enumeration import Block, Words, columns_of

_ONES = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class Downsets:
    """Sets of nodes that hold every predecessor of their nodes, sorted by their work.

    Attributes:
        words: bit ``v % 64`` of ``words[i, v // 64]`` is 1 if set ``i`` contains node ``v``; [sets, words].
        block: index of the block that each set ends in, [sets]. A set of an earlier block is a subset.
        work: work of all nodes in each set, [sets].
        seconds: seconds of all nodes in each set that may run on each device type, [types, sets].
        banned: number of nodes in each set that may not run on each device type, [types, sets].
        bytes: bytes of all nodes in each set, [sets].
        crossing: seconds of the nets with pins inside and outside each set, [sets].
        key: random hash of each set, [sets]: ``key[i] + keys[v]`` is the hash of set ``i`` with node ``v`` added.
        keys: random hash of each node, [nodes].
        ranges: for each block, the range of words in which its sets differ.
    """

    words: Words
    block: NDArray[np.int32]
    work: Floats
    seconds: Floats
    banned: Ints
    bytes: Ints
    crossing: Floats
    key: Words
    keys: Words
    ranges: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.work)

    def inside(self, smaller: Ints, larger: Ints) -> NDArray[np.bool_]:
        """Return whether each set in ``smaller`` is a subset of the set at the same position in ``larger``."""
        blocks = self.block[smaller]
        result = blocks < self.block[larger]
        unclear = np.nonzero(blocks == self.block[larger])[0]
        if not len(unclear):
            return result
        # Sets that end in the same block differ only in the words of that block.
        numbers = blocks[unclear]
        low, high = self.ranges[numbers.min()][0], self.ranges[numbers.max()][1]
        is_subset = np.ones(len(unclear), dtype=bool)
        for word in range(low, high):
            is_subset &= self.words[smaller[unclear], word] & ~self.words[larger[unclear], word] == 0
        result[unclear] = is_subset
        return result


def downsets(
    problem: Problem, capacity: Capacity, most: int, clock: Clock, *, thin: bool = False
) -> Downsets | None:
    """Return the downsets that can be borders, or None if there are more than ``most``.

    Nodes are added in turn, see :class:`.enumeration.Block`. A *separator* is a node that is comparable with every
    other node. It starts a new block, whose first set contains all nodes before it. So the number of sets is the sum
    over the blocks between separators, not the product. The enumeration follows Tarnawski et al., NeurIPS 2020; the
    capacity test is not from that paper.

    With ``thin`` the sets are incomplete: for each amount of work, only the sets with the smallest crossing seconds.

    Takes O(sets x nodes of a block x nets of a node).
    """
    keys = np.random.default_rng(0).integers(0, 2**64, len(problem), dtype=np.uint64)
    parts: list[Block] = []
    count = 0
    columns = columns_of(problem)
    start = np.zeros(columns.shape[1])
    for low, high in blocks(problem):
        block = Block(problem, capacity, keys, columns, start, low, high, clock)
        for node in range(low, high):
            start = start + columns[node]
        if not block.enumerate(most if thin else most - count, thin=thin):
            return None
        count += len(block.work)
        parts.append(block)
    return _joined(problem, parts, keys)


def blocks(problem: Problem) -> list[tuple[int, int]]:
    """Return the ranges of nodes between separators. A downset contains all blocks before the block that it ends in.

    Node ``v`` is comparable with all others if no later node has all its predecessors before ``v``, and no earlier node
    has all its successors after ``v``. Takes O(nodes + edges).
    """
    count = len(problem)
    last_before = np.array([max(before, default=-1) for before in problem.predecessors])
    first_after = np.array([min(after, default=count) for after in problem.successors])
    earliest = np.minimum.accumulate(np.append(last_before, count)[::-1])[::-1]  # over this and later nodes
    latest = np.maximum.accumulate(np.append(-1, first_after))  # over earlier nodes
    cuts = [0]
    for node in range(count):
        if earliest[node + 1] >= node and latest[node] <= node:
            cuts.extend([node, node + 1])
    edges = sorted({*cuts, count})
    return list(itertools.pairwise(edges))


def _joined(problem: Problem, parts: list[Block], keys: Words) -> Downsets:
    count = sum(len(part.work) for part in parts)
    words = np.zeros((count, (len(problem) + 63) >> 6), dtype=np.uint64)
    row = 0
    for part in parts:
        end = row + len(part.work)
        words[row:end, : part.first_word] = _ONES
        words[row:end, part.first_word : part.first_word + part.words.shape[1]] = part.words
        row = end
    block = np.concatenate(
        [np.full(len(part.work), number, dtype=np.int32) for number, part in enumerate(parts)]
    )
    sums = np.concatenate([part.sums for part in parts])
    size = np.concatenate([part.bytes for part in parts])
    # Subsets come first, also among sets that differ only in nodes without work.
    order = np.lexsort((sums[:, 1], sums[:, 0]))
    types = len(problem.types)
    return Downsets(
        words=words[order],
        block=block[order],
        work=sums[order, 0],
        seconds=np.ascontiguousarray(sums[order, 2 : 2 + types].T),
        banned=np.rint(sums[order, 2 + types :].T).astype(np.int64),
        bytes=size[order],
        crossing=np.concatenate([part.crossing for part in parts])[order],
        key=np.concatenate([part.key for part in parts])[order],
        keys=keys,
        ranges=tuple((part.first_word, ((part.high - 1) >> 6) + 1) for part in parts),
    )
