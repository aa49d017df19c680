"""Enumerates the downsets of a graph that can lie before a border between two stages, as rows of bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedules.searching.clock import Clock

from .capacity import Capacity
from .problem import Floats, Ints, Problem

Words = NDArray[np.uint64]
Bools = NDArray[np.bool_]

# A block with more nodes is not enumerated. The ancestors of its nodes take nodes² bytes.
LARGEST_BLOCK = 2**14

# Number of intervals of work in which a family of sets is thinned.
THIN_BUCKETS = 256


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
        ranges: for each block, its first node and the node after it.
    """

    words: Words
    block: Ints
    work: Floats
    seconds: Floats
    banned: Ints
    bytes: Ints
    crossing: Floats
    ranges: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.work)

    def contains(self, rows: Ints, nodes: Ints) -> Bools:
        """Return whether each of the sets ``rows`` contains each of ``nodes``, [rows, nodes]."""
        words = self.words[rows[:, None], nodes >> 6]
        return (words >> (nodes & 63).astype(np.uint64) & np.uint64(1)).astype(bool)

    def nodes_near(self, rows: Ints) -> tuple[int, int]:
        """Return the range of the nodes in the blocks that the sets ``rows`` end in, and in the next block."""
        last = min(int(self.block[rows].max()) + 1, len(self.ranges) - 1)
        return self.ranges[self.block[rows].min()][0], self.ranges[last][1]

    def inside(self, smaller: Ints, larger: Ints) -> Bools:
        """Return whether each set in ``smaller`` is a subset of the set at the same position in ``larger``."""
        result = np.ones(len(smaller), dtype=bool)
        for word in range(self.words.shape[1]):
            result &= self.words[smaller, word] & ~self.words[larger, word] == 0
        return result


def downsets(
    problem: Problem, capacity: Capacity, most: int, clock: Clock, *, thin: bool = False
) -> Downsets | None:
    """Return the downsets that can be borders, or None if there are more than ``most``.

    A *separator* is a node that is comparable with every other node. It starts a new block, whose first set contains
    all nodes before it. So the number of sets is the sum over the blocks between separators, not the product. The
    enumeration follows Tarnawski et al., NeurIPS 2020; the capacity test is not from that paper.

    With ``thin`` the sets are incomplete: for each amount of work, only the sets with the smallest crossing seconds.

    Takes O(sets x nodes of a block x nets of a node).
    """
    parts: list[_Block] = []
    count = 0
    columns = _columns(problem)
    start = np.zeros(columns.shape[1])
    ranges = blocks(problem)
    for low, high in ranges:
        if high - low > LARGEST_BLOCK:
            return None
        part = _Block(problem, capacity, columns, start, (low, high), clock)
        if not part.enumerate(most if thin else most - count, thin=thin):
            return None
        for node in range(low, high):  # summed in node order, so that no subset is larger than its superset
            start = start + columns[node]
        count += len(part.words)
        parts.append(part)
    words, sums, size = (
        np.concatenate(column)
        for column in zip(*((part.words, part.sums, part.bytes) for part in parts), strict=True)
    )
    block = np.repeat(np.arange(len(parts)), [len(part.words) for part in parts])
    # Subsets come first, also among sets that differ only in nodes without work.
    order = np.lexsort((np.bitwise_count(words).sum(axis=1), sums[:, 0]))
    types = len(problem.types)
    return Downsets(
        words=words[order],
        block=block[order],
        work=sums[order, 0],
        crossing=sums[order, 1],
        seconds=np.ascontiguousarray(sums[order, 2 : 2 + types].T),
        banned=np.rint(sums[order, 2 + types :].T).astype(np.int64),
        bytes=size[order],
        ranges=tuple(ranges),
    )


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


class _Block:
    """The downsets that contain every node before ``low`` and no node from ``high`` on.

    For each node, every set that contains all its predecessors is copied with the node added, so every downset occurs
    once. A set without the node can never contain its descendants, which raises the lower bounds on the work outside
    and on the crossing seconds. Sets that the capacity does not allow are dropped at once.
    """

    def __init__(
        self,
        problem: Problem,
        capacity: Capacity,
        columns: Floats,
        start: Floats,
        block: tuple[int, int],
        clock: Clock,
    ) -> None:
        self._problem, self._capacity, self._columns, self._clock = problem, capacity, columns, clock
        self._low, self._high = block
        self.words = np.zeros((1, (len(problem) + 63) >> 6), dtype=np.uint64)
        for word, mask in _masks(list(range(self._low))):
            self.words[0, word] = mask
        self._first = self.words
        self.sums = start[None, :].copy()  # work, crossing seconds, then the columns for each device type
        self.bytes = problem.bytes[: self._low].sum()[None]
        self._count_nets()
        # For each set, the excluded node with the most work behind it; ``high - low`` for no node.
        self._excluded = np.full(1, self._high - self._low)
        self._find_ancestors()

    def _find_ancestors(self) -> None:
        """Set the ancestors of each node in the block, [nodes, nodes], and the work of each node's descendants.

        A node is its own ancestor and descendant.
        """
        problem, low, high = self._problem, self._low, self._high
        self._ancestors = np.eye(high - low, dtype=bool)
        # A separator follows, so all nodes after the block are descendants of every node in it.
        behind = np.full(high - low, problem.work[high:].sum())
        for node, ancestors in enumerate(self._ancestors):
            self._clock.check()
            for before in problem.predecessors[low + node]:
                if before >= low:
                    ancestors |= self._ancestors[before - low]
            behind += problem.work[low + node] * ancestors
        self._work_behind = np.append(behind, 0.0)
        self._work_left = self._work_behind.copy()  # without the nodes that are decided for every set

    def _count_nets(self) -> None:
        """Set, for each net with pins in the block, these pins and whether it has pins before or after the block.

        Nets with pins on both sides of the block and none inside are cut by every set except the empty and the full set
        of the block.
        """
        problem, low, high = self._problem, self._low, self._high
        local = sorted({number for node in range(low, high) for number in problem.nets_of[node]})
        nets = {number: problem.nets[number] for number in local}
        self._pins = {number: [pin for pin in net.pins if low <= pin < high] for number, net in nets.items()}
        self._ends = {number: (net.pins[0] < low, net.pins[-1] >= high) for number, net in nets.items()}
        inside = sum(net.seconds for number, net in nets.items() if all(self._ends[number]))
        self._spanning = problem.spanning_seconds(low, high) - inside

    def enumerate(self, most: int, *, thin: bool) -> bool:
        """Enumerate the sets. Return False if there are more than ``most`` of them and ``thin`` is False."""
        for node in range(self._low, self._high):
            self._clock.check()
            self._take(node)
            if len(self.words) > most:
                if not thin:
                    return False
                # The last set, with all nodes so far, is kept, because the sets of later blocks extend it.
                chosen = _least_crossed(self.sums[:, 0], self.sums[:, 1], most // 2)
                chosen[-1] = True
                self._keep(chosen)
        self._close()
        return True

    def _take(self, node: int) -> None:
        """Copy each set that has all predecessors of ``node``, and add the node to the copy."""
        ready = np.nonzero(self._all_in([v for v in self._problem.predecessors[node] if v >= self._low]))[0]
        taken_words, taken_sums = self.words[ready], self.sums[ready] + self._columns[node]
        for number in self._problem.nets_of[node]:
            seconds, early = self._problem.nets[number].seconds, self._ends[number][0]
            decided = [pin for pin in self._pins[number] if pin < node]
            # A net counts as cut as soon as a set has one of its pins and lacks another.
            if decided and not early:
                taken_sums[:, 1] += seconds * self._none_in(decided)[ready]
            if decided or early:
                self.sums[:, 1] += seconds * self._all_in(decided)
        taken_words[:, node >> 6] |= np.uint64(1 << (node & 63))
        local, excluded = node - self._low, self._excluded[ready]
        more = self._work_behind[local] > self._work_behind[excluded]
        self._excluded[ready] = np.where(more, local, excluded)
        self.words = np.concatenate([self.words, taken_words])
        self.sums = np.concatenate([self.sums, taken_sums])
        self.bytes = np.concatenate([self.bytes, self.bytes[ready] + self._problem.bytes[node]])
        self._excluded = np.concatenate([self._excluded, excluded])
        self._work_left[:-1] -= self._problem.work[node] * self._ancestors[local]
        # Drop the sets that the capacity does not allow, whichever nodes are added later.
        work, crossing = self.sums[:, 0], self.sums[:, 1]
        outside = self._capacity.prefix_work[node + 1] - work + self._work_left[self._excluded]
        lacks_a_node = self._excluded < self._high - self._low
        self._keep(self._capacity.allows(work, outside, crossing + self._spanning * lacks_a_node))

    def _close(self) -> None:
        """Count the nets with pins after the block, and drop the sets that the capacity does not allow."""
        for number, pins in self._pins.items():
            if self._ends[number][1]:
                # Nets with a pin of the block outside the set are already counted.
                self.sums[:, 1] += self._problem.nets[number].seconds * self._all_in(pins)
        self.sums[:, 1] += self._spanning
        # Drop the empty set of the block: it is the full set of the block before.
        fresh = (self.words != self._first).any(axis=1) | (self._low == 0)
        outside = self._capacity.prefix_work[-1] - self.sums[:, 0]
        self._keep(self._capacity.allows(self.sums[:, 0], outside, self.sums[:, 1]) & fresh)

    def _keep(self, chosen: Bools) -> None:
        """Drop all sets that are not ``chosen``."""
        if not chosen.all():
            self.words, self.sums = self.words[chosen], self.sums[chosen]
            self.bytes, self._excluded = self.bytes[chosen], self._excluded[chosen]

    def _all_in(self, nodes: list[int]) -> Bools:
        result = np.ones(len(self.words), dtype=bool)
        for word, mask in _masks(nodes):
            result &= self.words[:, word] & mask == mask
        return result

    def _none_in(self, nodes: list[int]) -> Bools:
        result = np.ones(len(self.words), dtype=bool)
        for word, mask in _masks(nodes):
            result &= self.words[:, word] & mask == 0
        return result


def _masks(nodes: list[int]) -> list[tuple[int, np.uint64]]:
    """Return the index and the value of each word that has bits of ``nodes``."""
    masks: dict[int, int] = {}
    for node in nodes:
        masks[node >> 6] = masks.get(node >> 6, 0) | 1 << (node & 63)
    return [(word, np.uint64(mask)) for word, mask in masks.items()]


def _columns(problem: Problem) -> Floats:
    """Return the values to sum for each set, [nodes, 2 + 2 types]: work, 0, seconds on each type, 1 if banned on it."""
    allowed = [np.isfinite(device_type.seconds) for device_type in problem.types]
    seconds = [
        np.where(ok, device_type.seconds, 0.0) for ok, device_type in zip(allowed, problem.types, strict=True)
    ]
    banned = [(~ok).astype(np.float64) for ok in allowed]
    return np.column_stack([problem.work, np.zeros(len(problem)), *seconds, *banned])


def _least_crossed(work: Floats, crossing: Floats, most: int) -> Bools:
    """Select at most about ``most`` sets: as many for each interval of work, those with the smallest crossing."""
    span = max(float(work.max() - work.min()), 1e-300)
    bucket = ((work - work.min()) / span * (THIN_BUCKETS - 1)).astype(np.int64)
    order = np.lexsort((crossing, bucket))
    sizes = np.bincount(bucket, minlength=THIN_BUCKETS)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rank < max(1, most // np.count_nonzero(sizes))
