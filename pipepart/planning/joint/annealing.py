"""Simulated annealing of layouts from many starts, then of the order of operations in the best layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

from schedules.searching.allowance import Allowance
from schedules.searching.bounds import trip_of, work_bound
from schedules.searching.dispatching import CAREFUL_RULES, RULES, dispatch, dispatching_work
from schedules.searching.local_search import anneal_order, round_work
from schedules.searching.objectives import makespan
from schedules.searching.playing import fits, last_ends, play
from schedules.searching.problem import Problem

from ..costs.layer_ranges import TOLERANCE
from ..plans.plan import Plan
from ..search.parts import Part
from .layout import Layout, OrderedLayout
from .moves import Moves
from .pricing import Pricing
from .starts import balanced_layouts, every_layout, ordered_layout_of

_MOST_LISTED = 256  # start from every layout if they are not more
_START_SHARE = 0.3  # share of the allowance for the starts
# Share of the allowance for annealing orders; the second if the starts are every layout.
_ORDER_SHARE, _ORDER_SHARE_LISTED = 0.1, 0.5
# The number of annealings is 2, plus 1 for each so many operations of the allowance.
_OPERATIONS_PER_ANNEALING = 1_000_000
_REORDERED = (16, 6, 2)  # number of layouts whose order is annealed, in each round
# First temperature: this times the mean seconds of a layer in a step, over the square root of layers per device.
_FIRST_TEMPERATURE = 0.15
_LAST_TEMPERATURE = 0.03  # relative to the first
_OPERATIONS_PER_STAGE = 7  # work of changing and bounding a layout, in operations per stage
_LIMITED_WORK = 2.5  # dispatching within limits of memory takes this times as long
# Mean fraction of the operations dispatched before a slow layout is given up.
_MEAN_FRACTION_BEFORE_CUTOFF = 0.4
# The mean end of the devices with stages is hardly ever below this fraction of the layout's bound.
_MEAN_END_TO_BOUND = 0.98


class Annealing:
    """The annealing of one joint search, with the best layouts so far.

    Args:
        part: layers, devices and constraints.
        allowance: the budget of the search.
        random: draws the moves.

    Attributes:
        pricing: gives the costs of layouts.
    """

    def __init__(self, part: Part, allowance: Allowance, random: Random) -> None:
        self._part, self._allowance, self._random = part, allowance, random
        self.pricing = Pricing(part)
        self._moves = Moves(part, self.pricing, random)
        self._ordered: list[OrderedLayout] = []
        least = part.least_seconds(part.most_devices) - part.request.cluster.step_seconds
        self._bound, costs = least * (1 + TOLERANCE), part.costs
        layer = costs.total_seconds / costs.layers * part.micro_batches / max(self.pricing.speeds)
        self._first_temperature = (
            _FIRST_TEMPERATURE * layer / math.sqrt(max(1.0, costs.layers / self.pricing.devices))
        )

    def run(self, plans: Sequence[Plan]) -> None:
        """Search from plans, each with its order and with dispatched orders, and from balanced layouts."""
        total = self._allowance.operations
        most = min(_MOST_LISTED, total * _START_SHARE / _OPERATIONS_PER_STAGE)
        listed = every_layout(self._part, self.pricing, most)
        listed.sort(key=lambda layout: _bound(self.pricing.problem(layout)))
        balanced = balanced_layouts(self._part, self.pricing)
        ordered = (ordered_layout_of(plan, self._part, self.pricing) for plan in plans)
        self._ordered = [each for each in ordered if each is not None]
        planned = [each.layout for each in self._ordered]
        self._dispatch_starts([*planned, *listed, *balanced], total * _START_SHARE)
        annealed = total * (1 - (_ORDER_SHARE_LISTED if listed else _ORDER_SHARE))
        rounds = 2 + int(total / _OPERATIONS_PER_ANNEALING)
        starts = self.distinct(rounds - 1)
        if not starts:
            return  # no start fits
        for number in range(rounds):
            start = starts[number % len(starts)] if number < rounds - 1 else self.distinct(1)[0]
            self._anneal(start, (annealed - self._allowance.used) / (rounds - number))
        self._reorder()

    def distinct(self, count: int | None = None) -> list[OrderedLayout]:
        """Return layouts that differ in cut, placement or modes, fastest first; at most ``count``.

        Of layouts with the same step, those with fewer stages come first.
        """
        unique: dict[object, OrderedLayout] = {}
        for ordered in sorted(self._ordered, key=_rank):
            layout = ordered.layout
            unique.setdefault((layout.borders, layout.devices, layout.modes), ordered)
        return list(unique.values())[:count]

    @property
    def _is_over(self) -> bool:
        """True if the allowance is spent, or the last layout meets the lower bound of the request."""
        return self._allowance.is_over or (bool(self._ordered) and self._ordered[-1].seconds <= self._bound)

    def _dispatch_starts(self, starts: Sequence[Layout], until: float) -> None:
        """Dispatch the starts under every rule, until the allowance has used ``until`` operations."""
        allowance = self._allowance
        best = min((ordered.seconds for ordered in self._ordered), default=math.inf)
        starts = [layout for layout in starts if self._moves.allows(layout)]
        places = range(len(starts))
        tried = product(places, (False, True)[: 1 + self.pricing.whole_helps], RULES)
        if self.pricing.limited:  # most orders do not fit: try all layouts under a few rules first
            rules = (*RULES[:2], *CAREFUL_RULES, *RULES[2:])
            tried = ((at, whole, rule) for rule in rules for whole in (False, True) for at in places)

        @cache
        def priced(at: int, whole: bool) -> tuple[Layout, Problem, float]:
            layout = replace(starts[at], whole=(whole,) * starts[at].stages)
            problem = self.pricing.problem(layout)
            allowance.spend(_OPERATIONS_PER_STAGE * layout.stages)
            return layout, problem, _bound(problem)

        for at, whole, rule in tried:
            if self._is_over or (self._ordered and allowance.used > until):
                return
            layout, problem, bound = priced(at, whole)
            if bound >= best:
                continue
            ordered = self._dispatch(replace(layout, rule=rule), problem)
            if ordered is not None:
                self._ordered.append(ordered)
                best = min(best, ordered.seconds)

    def _anneal(self, start: OrderedLayout, operations: float) -> None:
        """Anneal from a layout for a number of operations; record each new best layout."""
        allowance, random = self._allowance, self._random
        here, best, begin = start, start, allowance.used
        while (done := (allowance.used - begin) / max(operations, 1)) < 1 and not self._is_over:
            temperature = self._first_temperature * _LAST_TEMPERATURE**done
            layout = self._moves.neighbour(here.layout)
            allowance.spend(_OPERATIONS_PER_STAGE * (here.layout.stages + 2))
            if layout is None:
                continue
            limit = here.score - temperature * math.log(1 - random.random())
            problem = self.pricing.problem(layout)
            used = len(set(layout.devices)) / self.pricing.devices
            if _bound(problem) * (1 + _MEAN_END_TO_BOUND * used) > limit:
                continue
            ordered = self._dispatch(layout, problem, limit)
            if ordered is not None and ordered.score <= limit:
                here = ordered
                if ordered.seconds < best.seconds:
                    best = ordered
                    self._ordered.append(best)

    def _reorder(self) -> None:
        """Anneal the order of the best layouts, in rounds with fewer layouts and more work for each."""
        for number, count in enumerate(_REORDERED):
            chosen = self.distinct(count)
            left = (self._allowance.operations - self._allowance.used) / (len(_REORDERED) - number)
            for ordered in chosen:
                bound, problem = _bound(ordered.problem), ordered.problem
                rounds = int(left / len(chosen) / round_work(problem))
                if self._is_over or bound >= chosen[0].seconds * (1 - TOLERANCE):
                    continue  # no order of this layout is faster
                rows = anneal_order(
                    problem, ordered.rows, makespan, rounds, self._random, bound, self._allowance
                )
                ends = play(problem, rows)
                if ends is not None and max(ends) < ordered.seconds and fits(problem, rows, ends):
                    self._ordered.append(replace(ordered, rows=rows, done=last_ends(rows, ends)))

    def _dispatch(self, layout: Layout, problem: Problem, limit: float = math.inf) -> OrderedLayout | None:
        """Dispatch a layout by its rule; return None if it does not fit the memory or its score exceeds the limit."""
        dispatched = dispatch(problem, layout.rule, limit)
        share = 1.0 if dispatched is not None else _MEAN_FRACTION_BEFORE_CUTOFF
        limited = _LIMITED_WORK if problem.memory is not None else 1.0
        self._allowance.spend(share * limited * dispatching_work(problem))
        if dispatched is None:
            return None
        return OrderedLayout(layout, problem, dispatched.rows, dispatched.done)


def _bound(problem: Problem) -> float:
    """Return a lower bound in seconds for every order of a layout's operations."""
    return work_bound(problem, trip_of(problem))


def _rank(ordered: OrderedLayout) -> tuple[float, int, float]:
    """Return the sort key of a layout: rounded seconds; then stages, as each action has overhead; then score."""
    return float(f"{ordered.seconds:.9g}"), ordered.layout.stages, ordered.score
