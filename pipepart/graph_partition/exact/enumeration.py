"""Block: enumerates the downsets that end in one block of the graph, node by node, as columns of bits and sums."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedules.searching.clock import Clock

from ..problem import Floats, Problem
from .capacity import Capacity
from .reachability import Reachability

Words = NDArray[np.uint64]

# Number of buckets of work in a thinned family.
THIN_BUCKETS = 256


class Block:
    """The downsets that hold every node before ``low`` and none from ``high`` on.

    ``take(node)`` keeps each set of the nodes before as it is, and adds a copy with the node for each that holds all
    its predecessors, so every downset comes up once. A node that was left out excludes its descendants for good: this
    raises the lower bounds of the work outside and of the crossing seconds. Sets that no capacity allows are dropped at
    once.
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
        # Always summed in node order, so that rounding never makes a subset larger than its superset.
        self.sums = start[None, :]
        self.bytes = problem.bytes[:low].sum()[None]
        self.crossing = np.zeros(1)
        self.key = np.atleast_1d(keys[:low].sum(dtype=np.uint64))
        self._local_nets(problem, low, high)
        # For each set, the excluded node whose descendants have the most work; ``high - low`` means none.
        self._excluded = np.full(1, high - low)
        self._reachable = Reachability(problem, low, high)
        # A separator follows, so all work after the block descends from every node of it.
        after = float(problem.work[high:].sum())
        behind = self._reachable.work_behind(problem.work[low:high], clock)
        self._excluded_work = np.append(behind + after, 0.0)
        self._excluded_rest = self._excluded_work.copy()

    def _local_nets(self, problem: Problem, low: int, high: int) -> None:
        """Return, for each net with pins in the block, these pins and whether it has pins before or after the block.

        Nets with pins on both sides and none inside are cut by each set of the block but the empty and the full one.
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
        """Fill the columns. Return False if they would be longer than ``most`` and ``thin`` does not shorten them."""
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
        """Drop all other sets."""
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
            # A net counts as cut once one pin is in and one is out; before that all pins are on one side.
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
        # From here on the node counts as taken.
        self._excluded_rest[:-1] -= self._problem.work[node] * self._reachable.ancestors(local)
        self._drop(node)

    def _drop(self, node: int) -> None:
        """Drop the sets that no capacity allows, whichever nodes are added to them later."""
        rest = self._capacity.prefix_work[node + 1] - self.work + self._excluded_rest[self._excluded]
        crossing = self.crossing + np.where(self._excluded < self.high - self.low, self._spanning, 0.0)
        self.keep(self._capacity.allows(self.work, rest, crossing))

    def _thin(self, most: int) -> None:
        """Keep about ``most`` sets: for each amount of work the same number, those with the least crossing.

        The last set, with all nodes so far, is always kept: the sets of later blocks extend it.
        """
        chosen = least_crossed(self.work, self.crossing, most)
        chosen[-1] = True
        self.keep(chosen)

    def _close(self) -> None:
        for number, pins in self._pins.items():
            if self._ends[number][1]:
                # A net with a pin of the block outside is counted already.
                self.crossing += np.where(self._all_in(pins), self._problem.nets[number].seconds, 0.0)
        self.crossing = self.crossing + self._spanning
        # The set of all nodes of the block is the empty one of the next.
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
    """Return the values to sum for each set, one row per node: work, 1, seconds on each type, 1 if banned."""
    allowed = [np.isfinite(device_type.seconds) for device_type in problem.types]
    seconds = [
        np.where(ok, device_type.seconds, 0.0) for ok, device_type in zip(allowed, problem.types, strict=True)
    ]
    banned = [(~ok).astype(np.float64) for ok in allowed]
    return np.column_stack([problem.work, np.ones(len(problem)), *seconds, *banned])


def least_crossed(work: Floats, crossing: Floats, most: int) -> NDArray[np.bool_]:
    """Return about ``most`` sets: for each amount of work the same number, those with the least crossing."""
    span = max(float(work.max() - work.min()), 1e-300)
    bucket = ((work - work.min()) / span * (THIN_BUCKETS - 1)).astype(np.int64)
    order = np.lexsort((crossing, bucket))
    sizes = np.bincount(bucket, minlength=THIN_BUCKETS)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)[:-1]])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - starts[bucket[order]]
    # The largest number per bucket that keeps the total within bounds, by the sizes in ascending order.
    ascending = np.sort(sizes)
    total = np.cumsum(ascending) + ascending * np.arange(THIN_BUCKETS - 1, -1, -1)
    fitting = int(np.searchsorted(total, most, side="right"))
    below = int(ascending[:fitting].sum())
    return rank < max(1, (most - below) // max(1, THIN_BUCKETS - fitting))
