"""Dominance: drops borders to which a node can be added at no cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from schedules.searching.clock import Clock

from ..problem import Floats, Ints, Problem
from .downsets import Downsets, blocks
from .incidence import Incidence

# Number of sets whose bits are unpacked at once.
CHUNK = 1024


@dataclass(frozen=True)
class _Part:
    """The nodes from ``low`` to ``high``, the edges between them, and the nets with pins among them."""

    low: int
    high: int
    edges: csr_array
    pins: csr_array
    before: Ints
    sizes: Ints
    costs: Floats


class Dominance:
    """Drops border I if border I + v dominates it: both are reached with the same devices, and v does not raise loads.

    Consider any chain of stages that starts at I. In the chain from I + v, the stage of v has all its nodes but v. Its
    compute falls by the seconds of v. Its transfers fall by each net whose only pin outside I is v, and grow by each
    net of v without a pin in I. If the sum does not grow, the chain from I + v is as good. This also holds if v is in a
    stage after the next: the sum is then smaller still. It also holds for memory, for banned nodes, and for devices
    whose transfers cost nothing. A dominating set is larger, so at least one undominated border always remains.
    """

    def __init__(self, problem: Problem, sets: Downsets, incidence: Incidence) -> None:
        self._sets, self._incidence = sets, incidence
        edges = [(a, b) for a, after in enumerate(problem.successors) for b in after]
        sources, targets = (
            np.array(side, dtype=np.int64) for side in (zip(*edges, strict=True) if edges else ([], []))
        )
        shape = (len(problem), len(problem))
        self._edges = csr_array((np.ones(len(edges)), (sources, targets)), shape=shape)
        self._blocks = blocks(problem)
        self._parts: dict[tuple[int, int], _Part] = {}
        paying = [device_type.seconds for device_type in problem.types if device_type.pays]
        self._seconds = np.min(paying, axis=0) if paying else np.full(len(problem), np.inf)

    def undominated(self, rows: Ints, reached: Ints, clock: Clock) -> Ints:
        """Return the ``rows`` that no set in ``reached`` dominates. ``reached`` contains ``rows``."""
        order = reached[np.argsort(self._sets.key[reached], kind="stable")]
        keys = self._sets.key[order]
        rows = np.sort(rows)
        undominated = np.ones(len(rows), dtype=bool)
        for start in range(0, len(rows), CHUNK):
            clock.check()
            part = rows[start : start + CHUNK]
            index, nodes = self._profitable(part)
            wanted = self._sets.key[part[index]] + self._sets.keys[nodes]
            place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            same = np.nonzero(keys[place] == wanted)[0]
            larger, smaller, node = order[place[same]], part[index[same]], nodes[same]
            # Different sets may have equal hashes, so compare the sets.
            expected = self._sets.words[smaller]
            expected[np.arange(len(node)), node >> 6] |= np.uint64(1) << (node & 63).astype(np.uint64)
            undominated[start + index[same[(expected == self._sets.words[larger]).all(axis=1)]]] = False
        return rows[undominated]

    def _profitable(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return pairs (index in ``rows``, node) such that moving the node into that set cannot raise later loads."""
        # Only nodes of the block that the set ends in, or of the next block, can be added. It has all earlier nodes.
        ends = self._sets.block[rows]
        part = self._part(int(ends.min()), min(int(ends.max()) + 1, len(self._blocks) - 1))
        inside = self._incidence.unpacked(rows, part.low, part.high)
        missing = (~inside).astype(np.float64) @ part.edges
        counts = part.before + inside.astype(np.float64) @ part.pins
        balance = part.costs * ((part.sizes - counts == 1).astype(np.float64) - (counts == 0))
        gain = self._seconds[part.low : part.high] + balance @ part.pins.T
        index, nodes = np.nonzero(~inside & (missing == 0) & (gain >= 0))
        return index.astype(np.int64), nodes.astype(np.int64) + part.low

    def _part(self, first: int, last: int) -> _Part:
        if (first, last) not in self._parts:
            low, high = self._blocks[first][0], self._blocks[last][1]
            pins = self._incidence.matrix[low:high]
            nets = np.unique(pins.indices)
            self._parts[first, last] = _Part(
                low,
                high,
                self._edges[low:high, low:high],
                pins[:, nets],
                self._incidence.pins_before(low, nets),
                self._incidence.sizes[nets],
                self._incidence.costs[nets],
            )
        return self._parts[first, last]
