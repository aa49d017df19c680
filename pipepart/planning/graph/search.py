"""Finds the best cut of a problem, and proves that it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .bounds.crossing import Barrier
from .bounds.gap_search import RESOLUTION, Closing
from .budget import NO_LIMIT, Clock
from .device_states import Walk, walk
from .exact.chains import best_of_chain, is_chain
from .exact.decision import Decider
from .exact.ideals import blocks, downsets
from .exact.intervals import best_intervals
from .exact.spans import Spans
from .exact.windows import SLACK, Windows
from .heuristics.beam import beam, climb
from .heuristics.moves import bettered
from .heuristics.topological_orders import orders
from .problem import Problem, Split

# Borders of a family that is searched before the whole, and the fraction of a bottleneck that is left open there.
FEW = 3000
ENOUGH = 5e-4


@dataclass(frozen=True)
class Effort:
    """How much work a search may do before it settles for less than a proof; counted, so that runs repeat.

    Attributes:
        sets: borders kept at once.
        pairs: pairs of borders looked at.
        clock: when to settle at the latest; with a time, runs need not repeat.
    """

    sets: int = 400_000
    pairs: int = 200_000_000
    clock: Clock = NO_LIMIT


@dataclass(frozen=True)
class Found:
    """The best cut found, None where none fits, and what no cut can beat; ``optimal`` where both are proven."""

    split: Split | None
    lower_bound: float
    optimal: bool


def search(problem: Problem, effort: Effort, *, any_will_do: bool = False) -> Found:
    """The cut with the smallest bottleneck.

    First a good cut: the best intervals of a few topological orders, bettered by moves. Then the question whether any
    cut is better, answered over the downsets in the windows of that bottleneck. Usually the answer is no, and the
    cut is proven optimal by one decision; otherwise the gap to the lower bound is halved until it is. With
    ``any_will_do`` the first cut that fits is enough.
    """
    devices = walk(problem)
    low = floor(problem)
    one_order = all(high - start == 1 for start, high in blocks(problem))
    if is_chain(problem):
        split = best_of_chain(problem, devices, low, ceiling(problem), any_will_do=any_will_do)
        value = split.bottleneck(problem) if split else math.inf
        return Found(split, value if devices.complete else low, optimal=devices.complete and not any_will_do)
    split = first_cut(problem, devices, low, effort.clock, one_order=one_order)
    if split and any_will_do:
        return Found(split, low, optimal=False)
    if split and ((one_order and devices.complete) or split.bottleneck(problem) * (1 - RESOLUTION) <= low):
        return Found(split, split.bottleneck(problem), optimal=True)
    return _narrowed(problem, devices, split, low, effort)


def floor(problem: Problem) -> float:
    """Seconds that no cut can beat: the largest node, and all work shared out evenly."""
    room = sum(
        len(kind.devices) * float(worth) for kind, worth in zip(problem.types, problem.worth, strict=True)
    )
    largest = np.min([kind.seconds for kind in problem.types], axis=0).max()
    return max(float(largest), math.fsum(problem.work) / room * (1 - SLACK))


def ceiling(problem: Problem) -> float:
    """Seconds that no stage can exceed."""
    slowest = [max(s for s in seconds if math.isfinite(s)) for seconds in
               zip(*(kind.seconds.tolist() for kind in problem.types), strict=True)]  # fmt: skip
    return math.fsum(slowest) + math.fsum(net.seconds for net in problem.nets)


def first_cut(
    problem: Problem, devices: Walk, low: float, clock: Clock, *, one_order: bool = False
) -> Split | None:
    """A good cut, or None where no interval of the orders tried fits."""
    best: Split | None = None
    limit, most = math.inf, ceiling(problem)
    tried: set[tuple[int, ...]] = set()
    for order in [range(len(problem))] if one_order else orders(problem):
        if tuple(order) in tried:
            continue
        tried.add(tuple(order))
        # Narrow first: short intervals are quick to look at, and mostly enough.
        guess = min(2 * low, most) if best is None else limit
        while True:
            found = best_intervals(problem, order, devices, guess)
            if found or guess >= most or best:
                break
            guess = min(4 * guess, most) if guess else most
        if not found:
            continue
        better = bettered(problem, found)
        value = better.bottleneck(problem)
        if value < limit:
            best, limit = better, value * (1 - RESOLUTION)
        if clock.over or value <= low * (1 + RESOLUTION):
            break
    return best


def _narrowed(problem: Problem, devices: Walk, split: Split | None, low: float, effort: Effort) -> Found:
    if split and effort.clock.over:
        return Found(split, low, optimal=False)
    spans = Spans(problem)
    high = split.bottleneck(problem) if split else ceiling(problem) * (1 + RESOLUTION)
    sets = downsets(problem, Windows(problem, devices, high * (1 - RESOLUTION)), effort.sets, spans)
    if sets is None:
        return _approached(problem, devices, spans, effort.clock, split, low)
    if split and len(sets) > FEW:
        # Borders that the least crosses are the likeliest: mostly only the proof is left for the whole family.
        likely = Closing(problem, split, high, low)
        likely.close(Decider(problem, devices, sets.thinned(FEW), effort.pairs), effort.clock, ENOUGH)
        split, high = likely.split, likely.high
    closing = Closing(problem, split, high, low)
    if not closing.close(Decider(problem, devices, sets, effort.pairs), effort.clock):
        return _approached(problem, devices, spans, effort.clock, closing.split, closing.low)
    if closing.split is None:
        return Found(None, math.inf, optimal=devices.complete)
    return Found(closing.split, closing.high, optimal=devices.complete)


def _approached(
    problem: Problem, devices: Walk, spans: Spans, clock: Clock, split: Split | None, low: float
) -> Found:
    if split is None:
        return Found(None, low, optimal=False)
    if not clock.over:
        low = Barrier(problem, devices, spans).bound(low, split.bottleneck(problem))
    split = beam(problem, devices, spans, clock, split, low)
    split, low = climb(problem, devices, spans, clock, split, low)
    high = split.bottleneck(problem)
    return Found(split, min(low, high), optimal=devices.complete and low >= high * (1 - RESOLUTION))
