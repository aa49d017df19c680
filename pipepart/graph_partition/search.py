"""Searches for the cut with the smallest bottleneck, and proves it optimal or returns a lower bound.

The algorithm
-------------
A cut into a pipeline is a chain of *downsets* (sets of nodes that hold every predecessor of their nodes; *ideals* in
the papers): {} = I0 < I1 < ... < Ik = V. Each downset is a *border*; the nodes between two borders are a stage. ::

      a ──► b ──► d ──► e          I1 = {a, c}      stage 0 = I1 \\ I0 = a c
      │           ▲                I2 = {a, b, c, d}  stage 1 = I2 \\ I1 = b d
      └───► c ────┘                I3 = V             stage 2 = I3 \\ I2 = e

1. **Upper bound** (``exact/execution_order.py``). The best cut of the execution order into intervals, by dynamic
   programming. For a chain this is the best cut, and the search ends.
2. **Enumeration** (``exact/downsets.py``, ``enumeration.py``): the downsets that can be borders of a cut with a smaller
   bottleneck than the best cut so far; ``capacity.py`` rules out most downsets.
3. **Decision** (``exact/decision.py``): is there a cut with a bottleneck of at most T seconds? Border I' is reached
   with one more device than border I if I' \\ I is a stage of at most T seconds. There is a cut if V is reached.
   *Dominance* drops borders to which a node can be added at no cost.
4. **Closing the gap** (``bracket.py``). The first T is just below the upper bound. The answer is usually no, so one
   decision proves the cut optimal. Otherwise each answer lowers the upper bound or raises the lower bound.
5. **Too many downsets** (``beam.py``). A search among the downsets with the smallest crossing improves the cut, which
   may leave few enough downsets for steps 2 to 4. Otherwise the cut is not proven, and its lower bound is the work.

Invariants:

- Nodes are numbered in a topological order: every prefix is a downset.
- ``low <= optimum <= bottleneck(split)`` always holds. The result is ``optimal`` only if both bounds agree to 1e-9.
- Every loop over nodes, borders or decisions checks the clock.
- Pruning at T only drops downsets that are not a border of any cut with a bottleneck of at most T. Thinned families
  of downsets yield cuts, but no lower bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schedules.searching.clock import Clock, OutOfTime

from .beam import search_beam
from .bracket import RESOLUTION, Bracket
from .even_split import even_split
from .exact.capacity import Capacity
from .exact.decision import Decider
from .exact.downsets import Downsets, blocks, downsets
from .exact.execution_order import best_interval_split
from .problem import Problem, Split

MOST_BITS = 2**30  # maximum size of all downsets in memory: 128 MB


@dataclass(frozen=True)
class Effort:
    """The work that a search may do, counted in steps, so that equal calls give equal cuts.

    Attributes:
        sets: maximum number of downsets in memory.
        pairs: maximum number of pairs of borders to check.
        clock: time limit. With a time limit, results may differ between runs.
    """

    sets: int = 400_000
    pairs: int = 200_000_000
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class SearchResult:
    """The best cut or None, and a lower bound; ``optimal`` if the cut is proven optimal, or proven not to exist."""

    split: Split | None
    lower_bound: float
    optimal: bool


def search(problem: Problem, effort: Effort, *, any_will_do: bool = False) -> SearchResult:
    """Return the cut with the smallest bottleneck; with ``any_will_do``, the first cut that fits."""
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
    """Close the bracket. Return True if its cut is proven optimal, or proven not to exist."""
    problem = bracket.problem
    # If every downset is a prefix of the execution order, every cut is a cut of that order into intervals.
    is_one_order = all(high - start == 1 for start, high in blocks(problem))
    _cut_execution_order(bracket)
    if is_one_order or (any_will_do and bracket.split):
        return is_one_order
    if bracket.split and bracket.is_closed():
        return True
    return _close_gap(bracket, effort)


def _cut_execution_order(bracket: Bracket) -> None:
    """Find the best cut of the execution order into intervals."""
    # Start with a small limit: short intervals are quick to check and usually contain the optimum.
    most = bracket.high
    limit = min(1.25 * bracket.low, most)
    while not (split := best_interval_split(bracket.problem, bracket.clock, limit)) and limit < most:
        limit = min(2 * limit, most) if limit else most
    if split:
        bracket.offer(split)


def _close_gap(bracket: Bracket, effort: Effort) -> bool:
    problem, clock = bracket.problem, bracket.clock
    most = min(effort.sets, max(1, MOST_BITS // len(problem)))
    sets = _borders_below(bracket, most)
    if sets is None and bracket.split:
        search_beam(bracket)
        sets = _borders_below(bracket, most)
    if sets is not None and bracket.close(Decider(problem, sets, clock, effort.pairs)):
        return True
    return bracket.split is not None and bracket.is_closed()


def _borders_below(bracket: Bracket, most: int) -> Downsets | None:
    """Return the downsets that can be borders of a better cut, or None if there are more than ``most``."""
    capacity = Capacity(bracket.problem, bracket.high * (1 - RESOLUTION))
    return downsets(bracket.problem, capacity, most, bracket.clock)
