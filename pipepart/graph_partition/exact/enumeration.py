"""Block: enumerates the downsets that end in one block of the graph, node by node."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedules.searching.clock import Clock

from ..problem import Floats, Problem
from .capacity import Capacity
from .reachability import Reachability

Words = NDArray[np.uint64]

# Number of buckets by work that a family of sets is thinned in.
THIN_BUCKETS = 256


class Block:
    """The downsets that contain every node before ``low`` and no node from ``high`` on.

    For each node, every set that contains all its predecessors is copied with the node added, so every downset occurs
    once. A set without the node can never contain its descendants, which raises the lower bounds on the work outside
    and on the crossing seconds. Sets that the capacity does not allow are dropped at once.
    """

    def __init__(
        self,
        problem: Problem,
        capacity: Capacity,
        keys: Words,
        columns: Floats,
        start: Floats,
        low: int,
        high: int,
        clock: Clock,
    ) -> None:
        self._problem, self._capacity, self._keys, self._clock = problem, capacity, keys, clock
        self.low, self.high = low, high
        self.first_word = low >> 6
        base = np.zeros((1, ((high - 1) >> 6) - self.first_word + 1), dtype=np.uint64)
        base[0, 0] = (1 << (low & 63)) - 1
        self._base = self.words = base
        self._columns = columns
        # Summed in node order, so that rounding cannot make a subset larger than its superset.
        self.sums = start[None, :]
        self.bytes = problem.bytes[:low].sum()[None]
        self.crossing = np.zeros(1)
        self.key = np.atleast_1d(keys[:low].sum(dtype=np.uint64))
        self._local_nets(problem, low, high)
        # For each set, the excluded node with the most work behind it; ``high - low`` for no node.
        self._excluded = np.full(1, high - low)
        self._reachable = Reachability(problem, low, high)
        # A separator follows, so all nodes after the block are descendants of every node in it.
        work_after = float(problem.work[high:].sum())
        work_behind = self._reachable.work_behind(problem.work[low:high], clock)
        self._excluded_work = np.append(work_behind + work_after, 0.0)
        self._excluded_rest = self._excluded_work.copy()

    def _local_nets(self, problem: Problem, low: int, high: int) -> None:
        """Set, for each net with pins in the block, these pins and whether it has pins before or after the block.

        Nets with pins on both sides of the block and none inside are cut by every set except the empty and the full set
        of the block.
        """
        local = sorted({number for node in range(low, high) for number in problem.nets_of[node]})
        self._pins = {
            number: [pin for pin in problem.nets[number].pins if low <= pin < high] for number in local
        }
        self._ends = {number: (problem.nets[number].pins[0] < low, problem.nets[number].pins[-1] >= high)
                      for number in local}  # fmt: skip
        inside = sum(problem.nets[number].seconds for number in local if all(self._ends[number]))
        self._spanning = problem.spanning_seconds(low, high) - inside

    @property
    def work(self) -> Floats:
        """Work of each set."""
        return self.sums[:, 0]

    def enumerate(self, most: int, *, thin: bool) -> bool:
        """Enumerate the sets. Return False if there are more than ``most`` of them and ``thin`` is False."""
        for node in range(self.low, self.high):
            self._clock.check()
            self._take(node)
            if len(self.work) > most:
                if not thin:
                    return False
                self._thin(most // 2)
        self._close()
        return True

    def keep(self, chosen: NDArray[np.bool_]) -> None:
        """Drop all sets that are not ``chosen``."""
        if chosen.all():
            return
        self.words, self.sums, self.bytes = self.words[chosen], self.sums[chosen], self.bytes[chosen]
        self.crossing, self.key, self._excluded = (
            self.crossing[chosen],
            self.key[chosen],
            self._excluded[chosen],
        )

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
            # A net counts as cut as soon as a set has one of its pins and lacks another.
            self.crossing += np.where(self._all_in(decided), seconds, 0.0)
            if not early:
                taken_cut = taken_cut + np.where(self._none_in(decided)[ready], seconds, 0.0)
        taken_words[:, (node >> 6) - self.first_word] |= np.uint64(1 << (node & 63))
        local, excluded = node - self.low, self._excluded[ready]
        self._excluded[ready] = np.where(
            self._excluded_work[local] > self._excluded_work[excluded], local, excluded
        )
        self.words = np.concatenate([self.words, taken_words])
        self.sums = np.concatenate([self.sums, self.sums[ready] + self._columns[node]])
        self.bytes = np.concatenate([self.bytes, self.bytes[ready] + self._problem.bytes[node]])
        self.crossing = np.concatenate([self.crossing, taken_cut])
        self.key = np.concatenate([self.key, self.key[ready] + self._keys[node]])
        self._excluded = np.concatenate([self._excluded, excluded])
        # From here on, the work of the node is decided for every set.
        self._excluded_rest[:-1] -= self._problem.work[node] * self._reachable.ancestors(local)
        self._drop(node)

    def _drop(self, node: int) -> None:
        """Drop the sets that the capacity does not allow, whichever nodes are added later."""
        rest = self._capacity.prefix_work[node + 1] - self.work + self._excluded_rest[self._excluded]
        crossing = self.crossing + np.where(self._excluded < self.high - self.low, self._spanning, 0.0)
        self.keep(self._capacity.allows(self.work, rest, crossing))

    def _thin(self, most: int) -> None:
        """Drop all but about ``most`` sets: the same number for each amount of work, with the smallest crossing.

        The last set, with all nodes so far, is never dropped, because the sets of later blocks extend it.
        """
        chosen = least_crossed(self.work, self.crossing, most)
        chosen[-1] = True
        self.keep(chosen)

    def _close(self) -> None:
        for number, pins in self._pins.items():
            if self._ends[number][1]:
                # Nets with a pin of the block outside the set are already counted.
                self.crossing += np.where(self._all_in(pins), self._problem.nets[number].seconds, 0.0)
        self.crossing = self.crossing + self._spanning
        # Drop the empty set of the block: it is the full set of the block before.
        empty = (self.words == self._base).all(axis=1)
        outside = self._capacity.prefix_work[-1] - self.work
        self.keep(self._capacity.allows(self.work, outside, self.crossing) & (~empty | (self.low == 0)))

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


def columns_of(problem: Problem) -> Floats:
    """Return the values to sum for each set, [nodes, 2 + 2 types]: work, 1, seconds on each type, 1 if banned on it."""
    allowed = [np.isfinite(device_type.seconds) for device_type in problem.types]
    seconds = [
        np.where(ok, device_type.seconds, 0.0) for ok, device_type in zip(allowed, problem.types, strict=True)
    ]
    banned = [(~ok).astype(np.float64) for ok in allowed]
    return np.column_stack([problem.work, np.ones(len(problem)), *seconds, *banned])


def least_crossed(work: Floats, crossing: Floats, most: int) -> NDArray[np.bool_]:
    """Select about ``most`` sets: for each amount of work the same number, with the smallest crossing seconds."""
    span = max(float(work.max() - work.min()), 1e-300)
    bucket = ((work - work.min()) / span * (THIN_BUCKETS - 1)).astype(np.int64)
    order = np.lexsort((crossing, bucket))
    sizes = np.bincount(bucket, minlength=THIN_BUCKETS)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)[:-1]])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - starts[bucket[order]]
    # Find the largest number per bucket such that the total is at most ``most``, from the sorted bucket sizes.
    ascending = np.sort(sizes)
    total = np.cumsum(ascending) + ascending * np.arange(THIN_BUCKETS - 1, -1, -1)
    fitting = int(np.searchsorted(total, most, side="right"))
    below = int(ascending[:fitting].sum())
    return rank < max(1, (most - below) // max(1, THIN_BUCKETS - fitting))
