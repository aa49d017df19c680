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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from schedules.searching.clock import Clock, OutOfTime

from .bracket import RESOLUTION, Bracket
from .exact.capacity import Capacity
from .exact.decision import Decider
from .exact.downsets import Downsets, blocks, downsets
from .exact.intervals import best_order_split
from .heuristics.beam import raise_bound, search_beam
from .heuristics.even_split import even_split
from .heuristics.topological_orders import topological_orders
from .problem import Problem, Split

# Size of the thinned family of borders that is searched first, and the gap at which that search stops.
FEW = 3000
ENOUGH = 5e-4

# Bits of the downsets kept at once: 128 MB.
MOST_BITS = 2**30


@dataclass(frozen=True)
class Effort:
    """The work that a search may do, counted in steps, so that equal calls give equal cuts.

    Attributes:
        sets: downsets kept at once.
        pairs: pairs of borders checked.
        clock: time limit. With one, results may differ between runs.
    """

    sets: int = 400_000
    pairs: int = 200_000_000
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class SearchResult:
    """The best cut found (or None) and a lower bound; ``optimal`` if the cut is proven best, or that none fits."""

    split: Split | None
    lower_bound: float
    optimal: bool


def search(problem: Problem, effort: Effort, *, any_will_do: bool = False) -> SearchResult:
    """Return the cut with the smallest bottleneck; with ``any_will_do`` the first one found that fits."""
    bracket = Bracket.of(problem, effort.clock)
    try:
        proven = _search(bracket, effort, any_will_do)
    except OutOfTime:
        proven = False
    if bracket.split is None and not proven and (fallback := even_split(problem)):
        bracket.offer(fallback)
    proven = proven and problem.orders.complete
    low = bracket.high if proven else min(bracket.low, bracket.high)
    return SearchResult(bracket.split, low, optimal=proven)


def _search(bracket: Bracket, effort: Effort, any_will_do: bool) -> bool:
    """Bring the bracket together. Return whether its cut is proven best, or that there is none."""
    problem = bracket.problem
    # If each downset is a prefix of one order, every cut is a cut of that order into intervals.
    is_one_order = all(high - start == 1 for start, high in blocks(problem))
    _cut_orders(bracket, [range(len(problem))] if is_one_order else topological_orders(problem))
    if is_one_order or (any_will_do and bracket.split):
        return is_one_order
    if bracket.split and bracket.is_closed():
        return True
    return _close_gap(bracket, effort)


def _cut_orders(bracket: Bracket, orders: Iterable[Sequence[int]]) -> None:
    """Find the best cut into intervals of each order, improved by moves of single nodes."""
    problem, most = bracket.problem, bracket.high
    for order in orders:
        # Loads are differences of running sums, which can round to a little more than the bound.
        limit = bracket.high * (1 - RESOLUTION) if bracket.split else min(1.25 * bracket.low, most)
        # A small limit first: short intervals are quick to check and usually enough.
        while not (found := best_order_split(problem, order, bracket.clock, limit)):
            if bracket.split or limit >= most:
                break
            limit = min(2 * limit, most) if limit else most
        if found:
            bracket.offer(found)
        if bracket.split and bracket.is_closed():
            return


def _close_gap(bracket: Bracket, effort: Effort) -> bool:
    problem, clock = bracket.problem, bracket.clock
    most = min(effort.sets, max(1, MOST_BITS // len(problem)))
    sets = _borders_below(bracket, most)
    if sets is None and bracket.split:
        search_beam(bracket)
        sets = _borders_below(bracket, most)
    if sets is not None:
        if bracket.split and len(sets) > FEW:
            # The best cut is usually among the least crossed borders; then the whole family only has to prove it.
            likely = Decider(problem, sets.thinned(FEW), clock, effort.pairs)
            bracket.close(likely, ENOUGH, complete=False)
        if bracket.close(Decider(problem, sets, clock, effort.pairs)):
            return True
    if bracket.split:
        raise_bound(bracket)
    return bracket.split is not None and bracket.is_closed()


def _borders_below(bracket: Bracket, most: int) -> Downsets | None:
    """Return the downsets that can be borders of a better cut, or None if there are more than ``most``."""
    capacity = Capacity(bracket.problem, bracket.high * (1 - RESOLUTION))
    return downsets(bracket.problem, capacity, most, bracket.clock)
