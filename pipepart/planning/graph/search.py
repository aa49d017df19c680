"""Searches for the cut of a problem with the smallest bottleneck, and proves it or bounds it.

The algorithm
-------------
A cut into a pipeline is a chain of *downsets* (sets of nodes that hold every predecessor of their nodes; *ideals* in
the papers): {} = I0 < I1 < ... < Ik = V. Each downset is a *border*; the nodes between two borders are a stage. ::

      a ──► b ──► d ──► e          I1 = {a, c}      stage 0 = I1 \\ I0 = a c
      │           ▲                I2 = {a, b, c, d}  stage 1 = I2 \\ I1 = b d
      └───► c ────┘                I3 = V             stage 2 = I3 \\ I2 = e

1. **Upper bound** (``initial_split``). The best cut into intervals of a few topological orders, by dynamic programming
   (``exact/intervals.py``), improved by moves of single nodes (``heuristics/local_moves.py``).
2. **Decision** (``exact/decision.py``): is there a cut with a bottleneck of at most T seconds? First the downsets that
   can be borders at T are enumerated (``exact/downsets.py``, ``enumeration.py``); ``capacity.py`` rules out most. Then
   border I' is reached with one more device than border I if I' \\ I is a stage of at most T seconds. There is a cut if
   V is reached. *Dominance* leaves out borders to which a node can be added at no cost.
3. **Gap search** (``gap_search.py``). First T just below the upper bound: mostly the answer is no, which proves
   the cut optimal by one decision. Otherwise each answer lowers the upper bound or raises the lower bound.
4. **Too many downsets**. Orders through thin places (``heuristics/thin_places.py``) improve the cut, which may leave
   few enough. Else (``_bound_gap``) minimum cuts bound from below (``crossing_bound.py``), a beam of the least crossed
   downsets improves the cut from above, and decisions at small T raise the bound (``heuristics/beam.py``).

Invariants:

- Nodes are numbered in a topological order: every prefix is a downset.
- ``low <= optimum <= bottleneck(split)`` at any time. The result is ``optimal`` only if the two agree to 1e-9.
- Pruning is safe at T: it may only drop downsets that are no border of any cut with a bottleneck of at most T.
  Families that were thinned yield cuts, never bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .crossing_bound import CrossingBound
from .exact.capacity import SLACK, Capacity
from .exact.decision import Decider
from .exact.downsets import blocks, downsets
from .exact.intervals import best_order_split
from .gap_search import RESOLUTION, Budget, GapSearch
from .heuristics.beam import beam, raise_bound
from .heuristics.local_moves import improve_by_moves
from .heuristics.thin_places import thin_order
from .heuristics.topological_orders import topological_orders
from .problem import Problem, Split

# Size of the thinned family of borders that is searched first, and the gap at which that search stops.
FEW = 3000
ENOUGH = 5e-4

# Borders of an order through thin places times nodes.
MOST_MINIMUM_CUTS = 16_000

# Bits of the downsets kept at once: 512 MB.
MOST_BITS = 2**32


@dataclass(frozen=True)
class Effort:
    """The work that a search may do, counted in steps, so that equal calls give equal cuts.

    Attributes:
        sets: downsets kept at once.
        pairs: pairs of borders checked.
        budget: time limit. With one, results may differ between runs.
    """

    sets: int = 400_000
    pairs: int = 200_000_000
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True)
class SearchResult:
    """The best cut found (or None) and a lower bound; ``optimal`` if the cut is proven best, or that none fits."""

    split: Split | None
    lower_bound: float
    optimal: bool


def search(problem: Problem, effort: Effort, *, any_will_do: bool = False) -> SearchResult:
    """Return the cut with the smallest bottleneck; with ``any_will_do`` the first one found that fits."""
    low = simple_lower_bound(problem)
    one_order = all(high - start == 1 for start, high in blocks(problem))
    split = initial_split(problem, low, effort.budget, one_order=one_order)
    if split and any_will_do:
        return SearchResult(split, low, optimal=False)
    if one_order:
        # Each downset is a prefix of one order, so every cut is a cut of that order into intervals.
        value = split.bottleneck(problem) if split else math.inf
        return SearchResult(split, value if problem.orders.complete else low, optimal=problem.orders.complete)
    if split and split.bottleneck(problem) * (1 - RESOLUTION) <= low:
        return SearchResult(split, split.bottleneck(problem), optimal=True)
    if effort.budget.spent:
        return SearchResult(split, low, optimal=False)
    return _close_gap(problem, split, low, effort)


def simple_lower_bound(problem: Problem) -> float:
    """Return a lower bound in seconds: the largest node, or all work spread evenly over the devices."""
    each = zip(problem.types, problem.device_weights, strict=True)
    total = sum(len(device_type.devices) * float(weight) for device_type, weight in each)
    largest = np.min([device_type.seconds for device_type in problem.types], axis=0).max()
    return max(float(largest), math.fsum(problem.work) / total * (1 - SLACK))


def simple_upper_bound(problem: Problem) -> float:
    """Return an upper bound in seconds: all nodes on their slowest device, and all transfers."""
    slowest = [max(s for s in seconds if math.isfinite(s)) for seconds in
               zip(*(device_type.seconds.tolist() for device_type in problem.types), strict=True)]  # fmt: skip
    return math.fsum(slowest) + math.fsum(net.seconds for net in problem.nets)


def initial_split(problem: Problem, low: float, budget: Budget, *, one_order: bool = False) -> Split | None:
    """A good cut, or None if no intervals of the orders tried fit."""
    best: Split | None = None
    # Loads are differences of running sums, which can round to a little more than the bound.
    limit, most = math.inf, simple_upper_bound(problem) * (1 + RESOLUTION)
    tried: set[tuple[int, ...]] = set()
    for order in [range(len(problem))] if one_order else topological_orders(problem):
        if tuple(order) in tried:
            continue
        tried.add(tuple(order))
        # A small limit first: short intervals are quick to check and usually enough.
        guess = min(1.25 * low, most) if best is None else limit
        while True:
            found = best_order_split(problem, order, guess)
            if found or guess >= most or best:
                break
            guess = min(2 * guess, most) if guess else most
        if not found:
            continue
        better = found if one_order else improve_by_moves(problem, found)
        value = better.bottleneck(problem)
        if value < limit:
            best, limit = better, value * (1 - RESOLUTION)
        if budget.spent or value <= low * (1 + RESOLUTION):
            break
    return best


def _close_gap(problem: Problem, split: Split | None, low: float, effort: Effort) -> SearchResult:
    high = split.bottleneck(problem) if split else simple_upper_bound(problem) * (1 + RESOLUTION)
    most = min(effort.sets, max(1, MOST_BITS // len(problem)))
    sets = downsets(problem, Capacity(problem, high * (1 - RESOLUTION)), most)
    if sets is None:
        split = _through_thin_places(problem, split, effort.budget)
        if split and split.bottleneck(problem) < high:
            high = split.bottleneck(problem)
            sets = downsets(problem, Capacity(problem, high * (1 - RESOLUTION)), most)
    if sets is None:
        return _bound_gap(problem, effort.budget, split, low)
    if split and len(sets) > FEW:
        # The best cut is usually among the least crossed borders; then the whole family only has to prove it.
        likely = GapSearch(problem, split, high, low)
        likely.close(Decider(problem, sets.thinned(FEW), effort.pairs), effort.budget, ENOUGH)
        split, high = likely.split, likely.high
    gap = GapSearch(problem, split, high, low)
    if not gap.close(Decider(problem, sets, effort.pairs), effort.budget):
        return _bound_gap(problem, effort.budget, gap.split, gap.low)
    if gap.split is None:
        return SearchResult(None, math.inf, optimal=problem.orders.complete)
    return SearchResult(gap.split, gap.high, optimal=problem.orders.complete)


def _through_thin_places(problem: Problem, split: Split | None, budget: Budget) -> Split | None:
    """Return the best of a cut and of those into intervals of orders through thin places."""
    for parts in (problem.device_count, 2 * problem.device_count):
        if budget.spent or parts * len(problem) > MOST_MINIMUM_CUTS:
            break
        limit = split.bottleneck(problem) * (1 - RESOLUTION) if split else math.inf
        found = best_order_split(problem, thin_order(problem, parts), limit)
        split = improve_by_moves(problem, found) if found else split
    return split


def _bound_gap(problem: Problem, budget: Budget, split: Split | None, low: float) -> SearchResult:
    """Return the best cut and bound if there are too many downsets, or the effort is spent."""
    if split is None:
        return SearchResult(None, low, optimal=False)
    if not budget.spent:
        low = CrossingBound(problem).bound(low, split.bottleneck(problem))
    split = beam(problem, budget, split, low)
    split, low = raise_bound(problem, budget, split, low)
    high = split.bottleneck(problem)
    return SearchResult(
        split, min(low, high), optimal=problem.orders.complete and low >= high * (1 - RESOLUTION)
    )
