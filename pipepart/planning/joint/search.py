"""The joint search itself: from many starts, the best few go on, by simulated annealing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

import schedules
from schedules import Kind
from schedules.searching.dispatching import Dispatched, dispatch, steady_keys

from ..costs.layer_ranges import TOLERANCE
from ..plan_document import Plan
from .allowance import Allowance
from .layout import Layout, Rule
from .moves import Moves
from .pricing import Pricing
from .request import JointRequest
from .starts import balanced_layouts, layout_of
from .to_plan import order_of, plan_of

_RULES = [
    Rule(spread, back, gap) for spread, back, gap in product((2.0, 0.6, -0.5), (2.0, 0.6, -0.5), (0.0, 0.5))
]
_KEPT = 4  # starts that annealing goes on from
_HOTTEST, _COLDEST = 0.01, 0.0003  # temperatures, relative to the step
_REJECTED = 40  # operations that a rejected move counts as


ALPHA=1.0
ABS=0.98
@dataclass(frozen=True)
class _Found:
    seconds: float
    score: float
    layout: Layout
    dispatched: Dispatched
    idle: list[float]


def search_jointly(
    request: JointRequest, starts: Sequence[Plan], allowance: Allowance, seed: int = 0
) -> Plan | None:
    """Return the plan with the shortest step that the joint search finds; None if it finds none faster than its starts.

    Args:
        request: what to choose from.
        starts: plans of one or more stages a device; their stages and placements are starts, their steps to be beaten.
        allowance: how much work to do; counted in it.
        seed: of the random moves.
    """
    if request.asked.reduction == "batch":
        return None  # the last stage must run all forwards first
    goal = min((plan.predicted.step_seconds for plan in starts), default=math.inf)
    engine = _Engine(request, allowance, Random(seed))
    engine.gather([layout_of(plan, request) for plan in starts if plan.replicas == request.groups.replicas])
    engine.anneal()
    best: Plan | None = None
    for found in engine.best:
        for order in _orders(request, found):
            made = plan_of(request, found.layout, order)
            if made is not None and made.predicted.step_seconds < goal * (1 - TOLERANCE):
                best, goal = made, made.predicted.step_seconds
        if best is not None:
            break
    return best


class _Engine:
    """The best layouts so far; owned by one call of `search_jointly`."""

    def __init__(self, request: JointRequest, allowance: Allowance, random: Random) -> None:
        self._request, self._allowance, self._random = request, allowance, random
        self._pricing = Pricing(request)
        self._moves = Moves(request, self._pricing, random)
        self._found: list[_Found] = []

    @property
    def best(self) -> list[_Found]:
        """The best layouts, the fastest first, one of each placement."""
        unique: dict[tuple[int, ...], _Found] = {}
        for found in sorted(self._found, key=lambda one: one.seconds):
            unique.setdefault(found.layout.devices, found)
        return list(unique.values())[:_KEPT]

    def gather(self, given: Sequence[Layout]) -> None:
        """Dispatch the starts under every rule."""
        for layout in (*given, *balanced_layouts(self._request, self._pricing)):
            if not self._moves.allows(layout):
                continue
            for rule in _RULES:
                if self._found and (self._allowance.is_over or self._allowance.spent > 0.2):
                    return
                self._try(replace(layout, rule=rule))

    def anneal(self) -> None:
        """Anneal from the best layouts; half of the allowance for the best of them."""
        starts = self.best
        for number, start in enumerate(starts):
            if self._allowance.is_over:
                return
            left = self._allowance.operations - self._allowance.used
            last = number == len(starts) - 1
            self._anneal(start if not last else self.best[0], left if last else left // (len(starts) + 1))

    def _anneal(self, start: _Found, operations: int) -> None:
        allowance, random = self._allowance, self._random
        here, best = start, start
        begin, micro_batches = allowance.used, self._pricing.micro_batches
        while (done := (allowance.used - begin) / max(operations, 1)) < 1 and not allowance.is_over:
            heat = here.seconds * _HOTTEST * (_COLDEST / _HOTTEST) ** done
            layout = self._moves.neighbour(here.layout, here.idle)
            allowance.used += _REJECTED
            if layout is None:
                continue
            limit = here.score - heat * math.log(1 - random.random())
            if self._pricing.bound(layout)*(1+ALPHA*ABS) > limit:
                continue
            made = self._dispatched(layout)
            if made is not None and made.score <= limit:
                here = made
                if made.seconds < best.seconds:
                    best = made
                    allowance.tell(best.seconds)
        self._found.append(best)

    def _try(self, layout: Layout) -> None:
        made = self._dispatched(layout)
        if made is not None:
            self._found.append(made)

    def _dispatched(self, layout: Layout) -> _Found | None:
        work = self._pricing.work(layout)
        if work is None:
            return None
        self._allowance.used += len(work.seconds)
        rule = layout.rule
        m=self._pricing.micro_batches
        found = dispatch(work, steady_keys(work, rule.spread, rule.spread_back), rule.weight_gap)
        return None if found is None else _Found(found.makespan, found.makespan + ALPHA*sum(found.ends)/len(found.ends), layout, found, [e-m*l for e,l in zip(found.ends,self._pricing.loads(layout))])


def _orders(request: JointRequest, found: _Found) -> list[schedules.Schedule]:
    """The order that was found, with each I and the W right behind it as one full backward, and as it is."""
    order = order_of(found.layout, request.micro_batches, found.dispatched.rows)
    fused = schedules.fuse_backward(order)
    return [fused, order] if any(a.kind is Kind.I for row in order.actions for a in row) else [order]
