"""Finds the best plan under a named schedule, for one number of micro-batches and one of replicas."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..costs.layer_ranges import TOLERANCE
from ..plans.plan import Plan
from .best_modes import with_best_modes
from .candidate import Candidate
from .improve_by_simulation import SimulatedCut, improve_by_simulation
from .search_order import with_split_critical

# One way to run the model, and the same with layers that share a parameter in different stages, for when the first one
# has no plan.
Ways = tuple[Candidate, ...]

_WORSE = 2  # numbers of stages a device, each more than the last, that have to be slower than a smaller one
_SIMULATED = 100  # operations that planning a candidate counts as, for each stage and micro-batch
_CHEAP = 1024  # stages of all replicas times micro-batches of each, up to which a candidate is cheap


@dataclass
class Named:
    """What is known of the candidates of one part of a request.

    Attributes:
        plans: of those that were planned to the end.
        slower: seconds that others cannot beat, where another plan is faster.
        failed: those that have no plan that fits.
        waiting: those that were not looked at.
    """

    plans: list[tuple[Candidate, Plan]] = field(default_factory=list)
    slower: list[tuple[Ways, float]] = field(default_factory=list)
    failed: list[Candidate] = field(default_factory=list)
    waiting: list[Ways] = field(default_factory=list)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest plan."""
        return min((plan.predicted.step_seconds for _, plan in self.plans), default=math.inf)

    def put_aside(self) -> None:
        """Plan none of those that wait: list their bounds only."""
        self.slower += [(ways, ways[0].shortest_possible_step) for ways in self.waiting]
        self.waiting = []

    def plan(self, ways: Ways, limit: float) -> float:
        """Plan one of the candidates, unless it takes no less than ``limit``; return seconds that it cannot beat."""
        for candidate in ways:
            made = find_plan(candidate, limit)
            if isinstance(made, Plan):
                self.plans.append((candidate, made))
                return made.predicted.step_seconds
            if made is not None:
                self.slower.append((ways, made))
                return made
        self.failed.append(ways[0])
        return math.inf


def find_named(
    candidates: Sequence[Ways],
    operations: float = math.inf,
    deadline: float = math.inf,
    limit: float = math.inf,
) -> Named:
    """Plan the candidates that may be the fastest; the others wait: those with many stages a device, or with recompute.

    For each schedule, the number of stages a device grows until two numbers in a row are no faster than a smaller one.
    A candidate is not planned to the end if a lower bound of its step is no less than the step of another plan.

    Args:
        candidates: the simplest first.
        operations: that may be simulated. After that the others wait, if there is a plan, but one of each schedule that
            is cheap: with the most devices that it fits, and its own number of stages on each.
        deadline: a moment of :func:`time.monotonic`, with the same effect.
        limit: seconds of a plan that is known.
    """
    found = Named()
    series: dict[tuple[str, int, str], list[Ways]] = {}
    for ways in candidates:
        if ways[0].is_extra:
            found.waiting.append(ways)
        else:
            series.setdefault((ways[0].schedule, ways[0].devices, ways[0].choice), []).append(ways)
    best = dict.fromkeys(series, math.inf)
    worse = dict.fromkeys(series, 0)
    missing = {schedule for schedule, _, _ in series}  # schedules of which nothing is known yet
    while series:
        # The most devices first: they stay if fewer are as fast.
        for key in sorted(series, key=lambda key: (-key[1], series[key][0][0].likely_step)):
            size = series[key][0][0].stages * series[key][0][0].micro_batches
            is_first = key[0] in missing and size * series[key][0][0].groups.replicas <= _CHEAP
            known = found.plans or limit < math.inf
            late = time.monotonic() >= deadline
            if (known and not is_first and (operations < 0 or late)) or (found.failed and not known and late):
                found.waiting += series.pop(key)
                continue
            operations -= _SIMULATED * size
            step = found.plan(series[key].pop(0), min(limit, found.fastest))
            if step < math.inf:
                missing.discard(key[0])
            worse[key] = 0 if step < best[key] else worse[key] + 1
            best[key] = min(best[key], step)
        missing.clear()
        found.waiting += [ways for key, left in series.items() if worse[key] == _WORSE for ways in left]
        series = {key: left for key, left in series.items() if left and worse[key] < _WORSE}
    return found


def plan_waiting(found: Named, limit: float, operations: int, deadline: float = math.inf) -> None:
    """Plan the candidates that wait, as far as they may take less than ``limit``.

    Args:
        found: gets the plans.
        limit: seconds of the best plan so far.
        operations: that may be simulated.
        deadline: a moment of :func:`time.monotonic`.
    """
    for ways in sorted(found.waiting, key=lambda ways: ways[0].stages):
        limit = min(limit, found.fastest)
        at_least = ways[0].shortest_possible_step
        # Whether it is possible is asked last: a schedule has to be built for that.
        if _is_no_less(at_least, limit) or operations < 0 or time.monotonic() >= deadline:
            found.slower.append((ways, at_least))
        elif not ways[0].impossible_reason:
            operations -= _SIMULATED * ways[0].stages * ways[0].micro_batches
            found.plan(ways, limit)
    found.waiting = []


def find_plan(candidate: Candidate, limit: float = math.inf) -> Plan | float | None:
    """Return the plan of a candidate; seconds that it cannot beat, if these are no less than ``limit``; or None."""
    if _is_no_less(candidate.shortest_possible_step, limit):
        return candidate.shortest_possible_step  # before a schedule is built to see whether it is possible
    if candidate.impossible_reason:
        return None
    start = candidate.smallest_bottleneck()
    if start is None:
        return None
    cuts = improve_by_simulation(candidate, start)
    if math.isfinite(limit) and "offload" not in candidate.modes:  # a mixture of modes may be faster
        at_least = _least_with_splits(candidate, cuts)
        if _is_no_less(at_least, limit):
            return at_least
    return _plan_of_best(candidate, cuts, start.bound)


def _is_no_less(seconds: float, limit: float) -> bool:
    return seconds >= limit * (1 - TOLERANCE)


def _least_with_splits(candidate: Candidate, cuts: Sequence[SimulatedCut]) -> float:
    """Seconds that no plan of these cuts can beat, whichever of its backwards are split."""
    columns = []
    for cut in cuts:
        borders = np.array([cut.borders], dtype=np.int64).reshape(1, -1)
        choices = candidate.cut_costs.of(borders).choices(cut.order)
        columns.append(candidate.step_times.columns(borders, choices, cut.order))
    return float(candidate.step_times.steps(columns, splits=candidate.costs.split is not None).min())


def _plan_of_best(candidate: Candidate, cuts: Sequence[SimulatedCut], bound: float) -> Plan | None:
    """Return the fastest plan of cuts, with backwards split where that is faster; None if none fits."""
    best: Plan | None = None
    exact = candidate.groups.replicas * candidate.cut_costs.copies == 1
    for cut in cuts:
        made = candidate.plan_for_cut(cut.borders, cut.order, bound)
        if made is None:
            continue
        if best is None or made.predicted.step_seconds < best.predicted.step_seconds * (1 - TOLERANCE):
            best = made
        if exact and made.predicted.step_seconds <= cut.step * (1 + TOLERANCE):
            break  # else messages or sums of gradients, which were not simulated, take time
    if best is None:
        return None
    return with_split_critical(with_best_modes(best, candidate.modes, candidate.costs), candidate.costs)
