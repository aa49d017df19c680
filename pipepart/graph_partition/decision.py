"""Decider: finds a cut with a bottleneck of at most T seconds, or proves that none of the given borders forms one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from schedules.searching.clock import Clock

from .capacity import SLACK, Capacity
from .downsets import Downsets
from .problem import Floats, Ints, Problem, Split

# Pairs of borders per numpy call. Each pair takes a few hundred bytes.
CHUNK = 200_000


# Number of sets that dominance checks at once.
ROWS = 1024


class TooMuchWork(Exception):
    """The decision needs more pairs of borders than the limit allows."""


class _Step(NamedTuple):
    """Borders reached by one stage on a device of ``type`` after their ``origins``, which were reached in ``state``."""

    rows: Ints
    origins: Ints
    state: int
    type: int


class _Window(NamedTuple):
    """Edges between the nodes of some blocks, and the nets with pins there: pins, pins before, all pins, seconds."""

    edges: csc_array
    pins: csc_array
    earlier: Floats
    sizes: Ints
    costs: Floats


class Decider:
    """Decides whether there is a cut with a bottleneck of at most T seconds whose borders are among given downsets.

    The empty border is reached in the state in which all devices are available. If border I is reached in a state and
    I' \\ I is a stage of at most T seconds on an available device, border I' is reached in the state without that
    device. States are visited in order, so the search includes the order of devices of different types. A border that
    was reached with a set of devices is not reached again with a larger set.

    *Dominance* drops border I if border I + v is reached with the same devices and v raises no load. Consider any chain
    of stages that starts at I. In the chain from I + v, the stage of v has all its nodes but v: its compute falls by
    the seconds of v, its transfers fall by each net whose only pin outside I is v, and grow by each net of v without a
    pin in I. If the sum does not grow, the chain from I + v is as good. This also holds if v is in a stage after the
    next, for memory, for banned nodes, and for devices whose transfers cost nothing. A dominating set is larger, so at
    least one border remains.

    Takes O(states x pairs of borders that capacity allows). Dominance leaves few such pairs.
    """

    def __init__(self, problem: Problem, sets: Downsets, clock: Clock, most_pairs: int) -> None:
        self._problem, self._orders, self._sets = problem, problem.orders, sets
        self._left_pairs = most_pairs
        self._clock = clock
        # Total memory of the available devices in each state; as Python integers, since sums may exceed 64 bits.
        self._memory = [
            sum(int(count) * kind.memory for count, kind in zip(row, problem.types, strict=True))
            for row in self._orders.available
        ]
        nets = problem.nets
        self._costs = np.array([net.seconds for net in nets])
        self._nodes = np.arange(len(problem))
        pins = np.array([pin for net in nets for pin in net.pins], dtype=np.int64)
        owners = np.repeat(np.arange(len(nets)), [len(net.pins) for net in nets])
        self._pins = csc_array((np.ones(len(pins)), (pins, owners)), shape=(len(problem), len(nets)))
        self._sizes = np.array([len(net.pins) for net in nets])
        edges = np.array(
            [(a, b) for a, after in enumerate(problem.successors) for b in after], dtype=np.int64
        )
        before, after = edges.reshape(-1, 2).T
        self._edges = csc_array((np.ones(len(before)), (before, after)), shape=(len(problem), len(problem)))
        paying = [device_type.seconds for device_type in problem.types if device_type.pays]
        self._seconds = np.min(paying, axis=0) if paying else np.full(len(problem), np.inf)
        # The hash of a set is the sum of random keys of its nodes.
        self._keys = np.random.default_rng(0).integers(0, 2**64, len(problem), dtype=np.uint64)
        self._hashes = np.zeros(len(sets), dtype=np.uint64)
        for start in range(0, len(sets), ROWS):
            clock.check()
            part = np.arange(start, min(start + ROWS, len(sets)))
            self._hashes[part] = sets.contains(part, self._nodes) @ self._keys
        self._windows: dict[tuple[int, int], _Window] = {}
        self._nets_left: dict[int, tuple[Ints, Floats, Floats]] = {}

    def split(self, seconds: float) -> Split | None:
        """Return a cut with a bottleneck of at most ``seconds``, or None if there is none.

        Raises:
            TooMuchWork: the limit on pairs of borders is reached.
            OutOfTime: the time limit is over.
        """
        orders, capacity = self._orders, Capacity(self._problem, seconds)
        reached = np.zeros((len(orders.available), len(self._sets)), dtype=bool)
        steps: list[list[_Step]] = [[] for _ in reached]
        reached[-1, 0] = True
        steps[-1].append(_Step(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), -1, -1))
        for state in range(len(reached) - 1, -1, -1):
            if not steps[state]:
                continue
            fresh = np.sort(np.concatenate([step.rows for step in steps[state]]))
            sources = self._undominated(fresh, np.nonzero(reached[state])[0])
            for edge in np.nonzero(orders.state == state)[0]:
                device_type, target = int(orders.type[edge]), int(orders.rest[edge])
                reached[target] |= reached[state]
                targets = np.nonzero(self._eligible(capacity, target) & ~reached[target])[0]
                origins = self._origins(sources, targets, device_type, capacity)
                rows = targets[origins >= 0]
                reached[target, rows] = True
                if len(rows):
                    steps[target].append(_Step(rows, origins[origins >= 0], state, device_type))
                if reached[target, -1]:
                    return self._trace(steps, target)
        return None

    def _undominated(self, rows: Ints, reached: Ints) -> Ints:
        """Return the ``rows`` that no set in ``reached`` dominates; ``reached`` contains ``rows``."""
        hashes = np.sort(self._hashes[reached])
        remains = np.ones(len(rows), dtype=bool)
        for start in range(0, len(rows), ROWS):
            self._clock.check()
            part = rows[start : start + ROWS]
            # Only nodes of the block that a set ends in, or of the next block, can be added.
            low, high = self._sets.nodes_near(part)
            window = self._window(low, high)
            inside = self._sets.contains(part, self._nodes[low:high]).astype(float)
            missing = (1 - inside) @ window.edges
            counts = window.earlier + inside @ window.pins
            balance = window.costs * ((window.sizes - counts == 1).astype(float) - (counts == 0))
            gain = self._seconds[low:high] + balance @ window.pins.T
            index, nodes = np.nonzero((inside == 0) & (missing == 0) & (gain >= 0))
            wanted = self._hashes[part[index]] + self._keys[low + nodes]
            place = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
            remains[start + index[hashes[place] == wanted]] = False
        return rows[remains]

    def _window(self, low: int, high: int) -> _Window:
        if (low, high) not in self._windows:
            pins = self._pins[low:high]
            nets = np.unique(pins.nonzero()[1])
            earlier = self._pins[:low].sum(axis=0)[nets]
            edges = self._edges[low:high, low:high]
            sizes, costs = self._sizes[nets], self._costs[nets]
            self._windows[low, high] = _Window(edges, pins[:, nets], earlier, sizes, costs)
        return self._windows[low, high]

    def _eligible(self, capacity: Capacity, state: int) -> NDArray[np.bool_]:
        """Return whether the available devices in ``state`` have capacity for all nodes after each border, [sets]."""
        sets = self._sets
        need = capacity.prefix_work[-1] - sets.work + capacity.transfer_weight * sets.crossing
        fits = sets.bytes[-1] - sets.bytes <= self._memory[state]
        return fits & (need <= capacity.total[state] + SLACK * capacity.total[-1])

    def _origins(self, sources: Ints, targets: Ints, device_type: int, capacity: Capacity) -> Ints:
        """Return for each target a source such that the nodes between are a stage on ``device_type``, or -1.

        The load of the stage between borders I and I' is compute + crossing(I) + crossing(I') - correction. The
        correction is for nets cut at both borders. It is computed last, only for pairs that exceed the limit without
        it. A lower bound of the load is compute + |crossing(I') - crossing(I)|, because the stage cuts each net that
        crosses only one of its borders.
        """
        sets, device = self._sets, self._problem.types[device_type]
        limit = capacity.seconds * (1 + SLACK)
        seconds, banned = sets.seconds[device_type], sets.banned[device_type]
        crossing = sets.crossing if device.pays else np.zeros(len(sets))
        origin = np.full(len(targets), -1, dtype=np.int64)
        for starts, places in self._pairs(sources, targets, device_type, capacity):
            self._clock.check()
            undecided = origin[places] < 0
            starts, places = starts[undecided], places[undecided]
            rows = targets[places]
            load = seconds[rows] - seconds[starts]
            possible = load + np.abs(crossing[rows] - crossing[starts]) <= limit
            possible &= sets.bytes[rows] - sets.bytes[starts] <= device.memory
            possible &= banned[rows] == banned[starts]
            starts, places, load = starts[possible], places[possible], load[possible]
            possible = sets.inside(starts, targets[places])
            starts, places, load = starts[possible], places[possible], load[possible]
            load = load + crossing[targets[places]] + crossing[starts]
            sure = load <= limit
            origin[places[sure]] = starts[sure]
            starts, places, load = starts[~sure], places[~sure], load[~sure]
            for begin, end in itertools.pairwise([*np.unique(starts, return_index=True)[1], len(starts)]):
                self._clock.check()
                todo = begin + np.nonzero(origin[places[begin:end]] < 0)[0]
                if len(todo):
                    source = int(starts[begin])
                    exact = load[todo] - self._correction(source, targets[places[todo]])
                    origin[places[todo[exact <= limit]]] = source
        return origin

    def _pairs(
        self, sources: Ints, targets: Ints, device_type: int, capacity: Capacity
    ) -> Iterator[tuple[Ints, Ints]]:
        """Yield chunks of pairs (source, index of the target) whose work fits one device of the type."""
        work = self._sets.work
        goals, low_work = work[targets], work[sources]
        rounding = SLACK * capacity.prefix_work[-1]
        most = low_work + capacity.device_capacity[device_type] * (1 + SLACK) + rounding
        low = np.searchsorted(goals, low_work)
        counts = np.maximum(np.searchsorted(goals, most, side="right") - low, 0)
        self._left_pairs -= int(counts.sum())
        if self._left_pairs < 0:
            raise TooMuchWork
        ends = np.cumsum(counts)
        start = 0
        while start < len(sources):
            done = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + CHUNK, side="right")))
            amount = counts[start:stop]
            first = np.repeat(low[start:stop] - np.append(0, np.cumsum(amount)[:-1]), amount)
            yield np.repeat(sources[start:stop], amount), first + np.arange(len(first))
            start = stop

    def _correction(self, source: int, rows: Ints) -> Floats:
        """Return crossing(source) + crossing(row) minus the transfers of the stage between, in seconds, [rows].

        These are the nets that both borders cut: their seconds if they have a pin in the stage, because a tensor counts
        once per stage; twice their seconds otherwise, because a tensor does not count in stages that it skips.
        """
        if source not in self._nets_left:
            inside = self._sets.contains(np.array([source]), self._nodes)[0]
            within, outside = inside.astype(float) @ self._pins, (~inside).astype(float) @ self._pins
            nets = np.nonzero((within > 0) & (outside > 0))[0]
            cut = self._pins[:, nets]
            left = np.unique(cut.indices[~inside[cut.indices]])
            self._nets_left[source] = left, cut[left].toarray(), self._costs[nets]
        left, pins, costs = self._nets_left[source]
        in_stage = self._sets.contains(rows, left).astype(float) @ pins
        return (in_stage < pins.sum(axis=0)) @ costs + (in_stage == 0) @ costs

    def _trace(self, steps: list[list[_Step]], state: int) -> Split:
        row = len(self._sets) - 1
        borders, types = [row], []
        while row:
            step = next(step for step in steps[state] if (step.rows == row).any())
            row, state = int(step.origins[step.rows == row][0]), step.state
            borders.append(row)
            types.append(step.type)
        inside = self._sets.contains(np.array(borders[::-1]), self._nodes)
        # A node is in the stage after the last border that does not contain it.
        stage_of = (~inside).sum(axis=0) - 1
        return Split(tuple(stage_of.tolist()), tuple(types[::-1]))
