"""The downsets of a graph that can be the border between two stages, as rows of bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Floats, Ints, Problem
from .windows import Windows

Words = NDArray[np.uint64]

# Amounts of work that a thinned family tells apart.
THIN_BUCKETS = 256

_ONES = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class Downsets:
    """Sets of nodes that hold all predecessors of their nodes, sorted by their least seconds.

    Attributes:
        words: bit ``v % 64`` of ``words[i, v // 64]`` says whether set ``i`` holds node ``v``.
        block: the run of nodes between two separators in which the set ends: a set of an earlier block is a subset.
        quickest: seconds of its nodes, each on the device that is quickest for it.
        seconds: of its nodes on each type of device, those left out that may not run there; shape (types, sets).
        banned: nodes of it that may not run on each type; same shape.
        bytes: of its nodes.
        crossing: seconds of the tensors with pins both inside and outside.
        key: a random hash, such that ``key[i] + keys[v]`` is the hash of set ``i`` with node ``v``.
        keys: of the nodes.
    """

    words: Words
    block: NDArray[np.int32]
    quickest: Floats
    seconds: Floats
    banned: Ints
    bytes: Ints
    crossing: Floats
    key: Words
    keys: Words

    def __len__(self) -> int:
        return len(self.quickest)

    def holds(self, rows: Ints, nodes: Ints) -> NDArray[np.bool_]:
        """Whether each of the sets holds each of the nodes, shape (rows, nodes)."""
        picked = self.words[rows[:, None], (nodes >> 6)[None, :]]
        return (picked >> (nodes & 63).astype(np.uint64)[None, :] & np.uint64(1)).astype(bool)


def downsets(problem: Problem, windows: Windows, most: int, *, thin: bool = False) -> Downsets | None:
    """All downsets that lie in the windows, or None where more than ``most`` would have to be kept.

    With ``thin`` those that the most crosses are left out instead, for each amount of work as many.

    Nodes are taken in turn; a set of those before stays as it is, and once more with the node where it holds all
    predecessors, so each downset comes up once. A separator, a node that is comparable with every other, starts anew
    from the one set that holds all before it: the work is the sum over the blocks between separators, not their
    product. (Enumeration as in Tarnawski et al., NeurIPS 2020, whose graphs of ideals these are; the windows are ours.)

    Takes O(sets × nodes of a block × tensors of a node).
    """
    keys = np.random.default_rng(0).integers(0, 2**64, len(problem), dtype=np.uint64)
    parts: list[_Block] = []
    kept = 0
    columns = _columns(problem)
    start = np.zeros(columns.shape[1])
    for low, high in blocks(problem):
        block = _Block(problem, windows, keys, columns, start, low, high)
        for node in range(low, high):
            start = start + columns[node]
        if not block.enumerate(most if thin else most - kept, thin=thin):
            return None
        kept += len(block.work)
        parts.append(block)
    return _joined(problem, parts, keys)


def blocks(problem: Problem) -> list[tuple[int, int]]:
    """Runs of nodes such that each downset holds all nodes of the runs before the one it ends in.

    Node ``v`` is comparable with all others when no node behind it has all its predecessors before it, and no node
    before it all its successors behind it. Takes O(nodes + edges).
    """
    count = len(problem)
    last_before = np.array([max(before, default=-1) for before in problem.predecessors])
    first_after = np.array([min(after, default=count) for after in problem.successors])
    behind = np.minimum.accumulate(np.append(last_before, count)[::-1])[::-1]
    ahead = np.maximum.accumulate(np.append(-1, first_after))
    cuts = [0]
    for node in range(count):
        if behind[node + 1] >= node and ahead[node] <= node:
            cuts.extend([node, node + 1])
    edges = sorted({*cuts, count})
    return list(itertools.pairwise(edges))


class _Block:
    """The downsets that hold every node before ``low`` and none from ``high`` on; columns of them grow together."""

    def __init__(
        self,
        problem: Problem,
        windows: Windows,
        keys: Words,
        columns: Floats,
        start: Floats,
        low: int,
        high: int,
    ) -> None:
        self._problem, self._windows, self._keys = problem, windows, keys
        self.low, self.high = low, high
        self.first_word = low >> 6
        base = np.zeros((1, ((high - 1) >> 6) - self.first_word + 1), dtype=np.uint64)
        base[0, 0] = (1 << (low & 63)) - 1
        self._base = self.words = base
        self._columns = columns
        # Added up in node order, as everywhere: so rounding never makes a subset come out larger.
        self.sums = start[None, :]
        self.bytes = problem.bytes[:low].sum()[None]
        self.crossing = np.zeros(1)
        self.key = np.atleast_1d(keys[:low].sum(dtype=np.uint64))
        self._lost = np.full(1, high - low)
        self._local_nets(problem, low, high)
        self._lost_mass = _lost_mass(problem, low, high)

    def _local_nets(self, problem: Problem, low: int, high: int) -> None:
        """Of the tensors with pins in the block, these pins, their cost, and whether others come before or behind.

        Those that pass over the block with no pin in it are cut by each of its sets, but for the empty and full one.
        """
        local = sorted({number for node in range(low, high) for number in problem.nets_of[node]})
        self._pins = {
            number: [pin for pin in problem.nets[number].pins if low <= pin < high] for number in local
        }
        self._ends = {number: (problem.nets[number].pins[0] < low, problem.nets[number].pins[-1] >= high)
                      for number in local}  # fmt: skip
        over = self._windows.spanning(low, high)
        self._spanning = over - sum(
            problem.nets[number].seconds for number in local if all(self._ends[number])
        )

    @property
    def work(self) -> Floats:
        """Quickest seconds of each set."""
        return self.sums[:, 0]

    def enumerate(self, most: int, *, thin: bool) -> bool:
        """Fills the columns; False where they would be longer than ``most``, unless some may be left out."""
        for node in range(self.low, self.high):
            self._take(node)
            if len(self.work) > most:
                if not thin:
                    return False
                self._thin(most // 2)
        self._close()
        return True

    def _take(self, node: int) -> None:
        before = [other for other in self._problem.predecessors[node] if other >= self.low]
        ready = np.nonzero(self._all_in(before))[0]
        taken_words = self.words[ready]
        taken_cut = self.crossing[ready]
        for number in self._problem.nets_of[node]:
            seconds, early = self._problem.nets[number].seconds, self._ends[number][0]
            decided = [pin for pin in self._pins[number] if pin < node]
            if not decided and not early:
                continue
            # A tensor is cut for sure once one pin is in and one is out; before that all are on one side.
            self.crossing += np.where(self._all_in(decided), seconds, 0.0)
            if not early:
                taken_cut = taken_cut + np.where(self._none_in(decided)[ready], seconds, 0.0)
        taken_words[:, (node >> 6) - self.first_word] |= np.uint64(1 << (node & 63))
        mass, lost = self._lost_mass, self._lost[ready]
        self._lost[ready] = np.where(mass[node - self.low, 0] > mass[lost, 0], node - self.low, lost)
        taken_lost = lost
        self.words = np.concatenate([self.words, taken_words])
        self.sums = np.concatenate([self.sums, self.sums[ready] + self._columns[node]])
        self.bytes = np.concatenate([self.bytes, self.bytes[ready] + self._problem.bytes[node]])
        self.crossing = np.concatenate([self.crossing, taken_cut])
        self.key = np.concatenate([self.key, self.key[ready] + self._keys[node]])
        self._lost = np.concatenate([self._lost, taken_lost])
        self._drop(node)

    def _drop(self, node: int) -> None:
        """Leaves out the sets that are in no window, whatever is still added to them."""
        rest = self._windows.mass[node + 1] - self.work + self._lost_mass[self._lost, node + 1 - self.low]
        crossing = self.crossing + np.where(self._lost < self.high - self.low, self._spanning, 0.0)
        self._keep(self._windows.allow(self.work, rest, crossing))

    def _thin(self, most: int) -> None:
        """Keeps about ``most`` sets: of each amount of work as many, those that the least crosses.

        The set that has lost nothing stays: all others of later blocks grow from it.
        """
        lost = self._lost < self.high - self.low
        span = max(float(self.work.max() - self.work.min()), 1e-300)
        bucket = ((self.work - self.work.min()) / span * (THIN_BUCKETS - 1)).astype(np.int64)
        order = np.lexsort((self.crossing, lost, bucket))
        sizes = np.bincount(bucket, minlength=THIN_BUCKETS)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)[:-1]])
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order)) - starts[bucket[order]]
        # The most per bucket that keeps the total within bounds, by the sizes in ascending order.
        ascending = np.sort(sizes)
        total = np.cumsum(ascending) + ascending * np.arange(THIN_BUCKETS - 1, -1, -1)
        fitting = int(np.searchsorted(total, most, side="right"))
        below = int(ascending[:fitting].sum())
        each = max(1, (most - below) // max(1, THIN_BUCKETS - fitting))
        self._keep((rank < each) | ~lost)

    def _close(self) -> None:
        for number, pins in self._pins.items():
            if self._ends[number][1]:
                # With a pin of the block out it counts already.
                self.crossing += np.where(self._all_in(pins), self._problem.nets[number].seconds, 0.0)
        self.crossing = self.crossing + self._spanning
        # The set of all nodes of the block is the empty one of the next.
        empty = (self.words == self._base).all(axis=1)
        outside = self._windows.mass[-1] - self.work
        self._keep(self._windows.allow(self.work, outside, self.crossing) & (~empty | (self.low == 0)))

    def _keep(self, chosen: NDArray[np.bool_]) -> None:
        if chosen.all():
            return
        self.words, self.sums, self.bytes = self.words[chosen], self.sums[chosen], self.bytes[chosen]
        self.crossing, self.key, self._lost = self.crossing[chosen], self.key[chosen], self._lost[chosen]

    def _all_in(self, nodes: list[int]) -> NDArray[np.bool_]:
        result = np.ones(len(self.words), dtype=bool)
        for word, mask in self._masks(nodes):
            result &= self.words[:, word] & mask == mask
        return result

    def _none_in(self, nodes: list[int]) -> NDArray[np.bool_]:
        result = np.ones(len(self.words), dtype=bool)
        for word, mask in self._masks(nodes):
            result &= self.words[:, word] & mask == 0
        return result

    def _masks(self, nodes: list[int]) -> list[tuple[int, np.uint64]]:
        masks: dict[int, int] = {}
        for node in nodes:
            word = (node >> 6) - self.first_word
            masks[word] = masks.get(word, 0) | 1 << (node & 63)
        return [(word, np.uint64(mask)) for word, mask in masks.items()]


def _columns(problem: Problem) -> Floats:
    """What is added up for each set, a row a node: quickest seconds, 1, seconds on each type, 1 where banned there."""
    allowed = [np.isfinite(kind.seconds) for kind in problem.types]
    seconds = [np.where(ok, kind.seconds, 0.0) for ok, kind in zip(allowed, problem.types, strict=True)]
    banned = [(~ok).astype(np.float64) for ok in allowed]
    return np.column_stack([problem.quickest, np.ones(len(problem)), *seconds, *banned])


def _lost_mass(problem: Problem, low: int, high: int) -> Floats:
    """Seconds of the descendants of node ``low + i`` that come at or behind node ``low + j``, at ``[i, j]``.

    The last row is for a set that has lost nothing.
    """
    size = high - low
    reach = np.zeros((size + 1, size), dtype=bool)
    for node in range(size - 1, -1, -1):
        reach[node, node] = True
        for after in problem.successors[low + node]:
            if after < high:
                reach[node] |= reach[after - low]
    mass = np.zeros((size + 1, size + 1))
    mass[:, :size] = np.cumsum((reach * problem.quickest[low:high])[:, ::-1], axis=1)[:, ::-1]
    # A separator follows, or nothing: all behind the block descends from each node of it.
    mass[:size] += problem.quickest[high:].sum()
    return mass


def _joined(problem: Problem, parts: list[_Block], keys: Words) -> Downsets:
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
    # Subsets come first, also among those that differ in nodes of no time.
    order = np.lexsort((sums[:, 1], sums[:, 0]))
    types = len(problem.types)
    return Downsets(
        words=words[order],
        block=block[order],
        quickest=sums[order, 0],
        seconds=np.ascontiguousarray(sums[order, 2 : 2 + types].T),
        banned=np.rint(sums[order, 2 + types :].T).astype(np.int64),
        bytes=size[order],
        crossing=np.concatenate([part.crossing for part in parts])[order],
        key=np.concatenate([part.key for part in parts])[order],
        keys=keys,
    )
