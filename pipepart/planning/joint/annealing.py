"""Annealing: searches layouts, from many starts to the best few, and then the order of the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random

from ..costs.layer_ranges import TOLERANCE
from .allowance import Allowance
from .judged import Judged, judge, reorder
from .layout import Layout, Rule
from .moves import Moves
from .pricing import Pricing
from .request import JointRequest
from .starts import balanced_layouts, every_placement

_RULES = [
    Rule(spread, back, gap) for spread, back, gap in product((2.0, 0.6, -0.5), (2.0, 0.6, -0.5), (0.0, 0.5))
]
_GATHERING = 0.3  # of the allowance
_REORDERING, _REORDERING_TINY = 0.1, 0.5  # likewise; the latter where all placements are starts
_ROUNDS, _ROUND = 2, 1_000_000  # annealings: at least so many, and one more for each so many operations
_REORDERED = (16, 6, 2)  # layouts whose order is annealed, round by round
# The first temperature: times the mean seconds of a layer in a step, by the root of layers a device.
_HEAT = 0.15
_COOLED = 0.03  # the last temperature, relative to the first
_MOVE = 40  # operations that a move counts as, besides those that it dispatches
_CUT_OFF = 0.4  # of the operations are dispatched until a layout proves to be too slow, on average
_PLAY = 0.5  # of the operations are played again by a move of the order, on average
_BOUND = 0.98  # of the bound of a layout is the mean end of its devices, hardly ever less


class Annealing:
    """The best layouts so far; owned by one search.

    Args:
        request: what to choose from.
        allowance: how much to do.
        random: of the moves.

    Attributes:
        pricing: of the layouts.
    """

    def __init__(self, request: JointRequest, allowance: Allowance, random: Random) -> None:
        self._request, self._allowance, self._random = request, allowance, random
        self.pricing = Pricing(request)
        self._moves = Moves(request, self.pricing, random)
        self._found: list[Judged] = []
        self._bound = request.bound * (1 + TOLERANCE)
        costs = request.costs
        layer = costs.total_seconds / costs.layers * request.micro_batches / max(self.pricing.speeds)
        self._layer = layer / math.sqrt(max(1.0, costs.layers / self.pricing.devices))

    def run(self, given: Sequence[Layout]) -> None:
        """Search from the given layouts and from balanced ones."""
        begin = self._allowance.used
        total = self._allowance.operations - begin
        tiny = self._gather(given, begin + total * _GATHERING)
        annealed = begin + total * (1 - (_REORDERING_TINY if tiny else _REORDERING))
        rounds = _ROUNDS + int(total / _ROUND)
        starts = _distinct(self._found, rounds - 1)
        if not starts:
            return  # nothing fits
        for number in range(rounds):
            start = starts[number % len(starts)] if number < rounds - 1 else self.best[0]
            self._anneal(start, (annealed - self._allowance.used) / (rounds - number))
        self._reorder()

    @property
    def best(self) -> list[Judged]:
        """What was found, the fastest first."""
        return sorted(self._found, key=lambda one: one.seconds)

    @property
    def _is_over(self) -> bool:
        """Whether the allowance is spent, or nothing can be faster than what was found."""
        return self._allowance.is_over or (bool(self._found) and self._found[-1].seconds <= self._bound)

    def _gather(self, given: Sequence[Layout], until: float) -> bool:
        """Dispatch the starts under every rule; return whether all placements are among them."""
        left = (until - self._allowance.used) / _MOVE
        every = every_placement(self._request, self.pricing, int(left))
        if every is not None:
            self._allowance.used += _MOVE * len(every) // 2
        best = math.inf
        for layout in (*given, *(every or balanced_layouts(self._request, self.pricing))):
            if not self._moves.allows(layout) or self.pricing.bound(layout) >= best:
                continue
            for rule, fused in product(_RULES, (False, True)[: 1 + self.pricing.fusing_helps]):
                if self._found and (self._is_over or self._allowance.used > until):
                    return every is not None
                made = self._judged(replace(layout, rule=rule, fused=(fused,) * layout.stages))
                if made is not None:
                    self._found.append(made)
                    best = min(best, made.seconds)
        return every is not None

    def _anneal(self, start: Judged, operations: float) -> None:
        """Anneal a layout, and keep the best ones on the way."""
        allowance, random, bound = self._allowance, self._random, self.pricing.bound
        here, best, begin = start, start, allowance.used
        while (done := (allowance.used - begin) / max(operations, 1)) < 1 and not self._is_over:
            heat = self._layer * _HEAT * _COOLED**done
            layout = self._moves.neighbour(here.layout, here.idle)
            allowance.used += _MOVE
            if layout is None:
                continue
            limit = here.score - heat * math.log(1 - random.random())
            if bound(layout) * (1 + _BOUND) > limit:
                continue
            made = self._judged(layout, limit)
            if made is not None and made.score <= limit:
                here = made
                if made.seconds < best.seconds:
                    best = made
                    self._found.append(best)
                    allowance.tell(best.seconds)

    def _reorder(self) -> None:
        """Anneal the order of the best layouts: of many a little, of the best few of these more."""
        for round_, count in enumerate(_REORDERED):
            goal = self.best[0].seconds
            chosen = _distinct(self._found, count)
            left = (self._allowance.operations - self._allowance.used) / (len(_REORDERED) - round_)
            for found in chosen:
                bound = self.pricing.bound(found.layout)
                share = left / len(chosen)
                plays = int(share / (_MOVE + _PLAY * len(found.work.seconds)))
                if self._is_over or bound >= goal * (1 - TOLERANCE):
                    continue  # no order of this layout is faster
                self._found.append(reorder(found, plays, bound, self._random))
                self._allowance.used += int(share)

    def _judged(self, layout: Layout, limit: float = math.inf) -> Judged | None:
        made = judge(layout, self.pricing, limit)
        share = 1.0 if made is not None else _CUT_OFF
        self._allowance.used += int(share * 3 * layout.stages * self.pricing.micro_batches)
        return made


def _distinct(found: Sequence[Judged], count: int) -> list[Judged]:
    """The fastest, one of each cut and placement."""
    unique: dict[tuple[tuple[int, ...], tuple[int, ...]], Judged] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        unique.setdefault((one.layout.borders, one.layout.devices), one)
    return list(unique.values())[:count]
