"""Finds the best plan under each named schedule, for one number of micro-batches and one of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from schedules.searching.clock import Clock, OutOfTime

from ..costs.layer_ranges import TOLERANCE
from ..costs.stage_memory import MODE_SETS
from ..partition.local_search import EvaluatedCut
from ..plans.plan import Plan
from .candidate import Candidate
from .cut_search import CutSearch
from .parts import Part
from .search_order import with_split_critical

# Candidates to try in order: with tied layers in one stage, then with tied layers split.
Attempts = tuple[Candidate, ...]

_PATIENCE = 2  # numbers of devices in a row that are no faster than more devices, until no fewer are tried
_FEW_DEVICES = 4  # up to which each number is tried, and schedules that are far slower on all devices as well
_MOST_NUMBERS = 24  # of devices that are tried
_FAR = 1.15  # times the fastest step, above which a schedule is not tried on fewer of many devices
# Stages times micro-batches, and layers, of a candidate that is planned even after the clock: about 20 ms each.
_CHEAP_SIZE, _CHEAP_LAYERS = 128, 64
_AFFORDABLE_SECONDS = 0.35  # to plan a candidate if there is no plan after the clock
_TRIES = 3  # of these, if the first ones do not fit
_SIMULATED = 3  # cuts of a candidate that plans are made of, where their evaluated seconds are not exact


class Outcome(NamedTuple):
    """What planning a candidate came to: its plan, bounds of its step in seconds, whether cuts were searched."""

    plan: Plan | None
    at_least: float
    at_most: float
    is_searched: bool = True


@dataclass
class Named:
    """What is known of the candidates of one part of a request.

    Attributes:
        plans: of those that were planned to the end.
        slower: seconds that others cannot beat, where another plan is faster or the clock was over.
        failed: those that have no plan that fits.
    """

    plans: list[tuple[Candidate, Plan]] = field(default_factory=list)
    slower: list[tuple[Candidate, float]] = field(default_factory=list)
    failed: list[Candidate] = field(default_factory=list)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest plan."""
        return min((plan.predicted.step_seconds for _, plan in self.plans), default=math.inf)

    def plan(self, attempts: Attempts, limit: float, clock: Clock) -> Outcome | None:
        """Plan the first of the attempts that has a plan, unless it takes no less than ``limit``; None if none fits."""
        for candidate in attempts:
            outcome = find_plan(candidate, limit, clock)
            if outcome is None:
                continue
            if outcome.plan is not None:
                self.plans.append((candidate, outcome.plan))
            else:
                self.slower.append((candidate, outcome.at_least))
            return outcome
        self.failed.append(attempts[0])
        return None


@dataclass
class _Series:
    """Attempts with one schedule, number of stages a device and choice of modes, the most devices first.

    Attributes:
        left: attempts that were not tried.
        is_default: whether the number of stages a device is that of the schedule, and the choice the request's first.
        best: seconds that the best of those that were tried takes at most.
        at_least: seconds that the last of those that were tried takes at least.
        slower: tried ones in a row that are no faster.
    """

    left: list[Attempts]
    is_default: bool
    best: float = math.inf
    at_least: float = 0.0
    slower: int = 0

    def tell(self, outcome: Outcome) -> None:
        """Count an outcome; give up fewer devices if they do not make the step shorter."""
        self.slower = self.slower + 1 if outcome.at_least >= self.best * (1 - TOLERANCE) else 0
        self.best, self.at_least = min(self.best, outcome.at_most), outcome.at_least
        if self.slower == _PATIENCE:
            self.left = []


def find_named(part: Part, clock: Clock, limit: float = math.inf, effort: float = math.inf) -> Named:
    """Plan the candidates that may be the fastest.

    For each schedule and number of stages a device, the number of devices falls until two numbers in a row are no
    faster, or, with more than four devices, until the schedule is 15 % slower than another one. With up to four devices
    what is tried does not depend on other schedules, but for those that a lower bound proves to be slower: the fastest
    plan of several schedules is no slower than that of one of them, unless the clock is over.

    Args:
        part: of a request.
        clock: after which only one candidate of each schedule is planned, with the most devices, if it is cheap.
        limit: seconds of a plan that is known.
        effort: the sum of ``planning_seconds`` after which no more candidates are planned. It does not depend on the
            machine.
    """
    named = Named()
    series = _series_of(part)
    is_first, left_out = True, False
    while series:
        # All schedules on the most devices first: plans stay on them if fewer are as fast.
        for line in sorted(series, key=_in_turn):
            attempts = line.left.pop(0)
            candidate = attempts[0]
            if is_first and line.is_default and _is_cheap(candidate):
                outcome = named.plan(attempts, math.inf, Clock())  # to the end, for the list of alternatives
            elif effort > 0 and clock.has(candidate.planning_seconds):
                outcome = named.plan(attempts, min(limit, named.fastest), clock)
            else:
                named.slower.append((candidate, candidate.shortest_possible_step))
                left_out = True
                continue
            if outcome is None or outcome.is_searched:
                effort -= candidate.planning_seconds
            if outcome is not None:
                line.tell(outcome)
        is_first = False
        leaves_far = part.most_devices > _FEW_DEVICES and part.groups.identical
        far = min(limit, named.fastest) * _FAR if leaves_far else math.inf
        series = [line for line in series if line.left and line.at_least < far]
    if left_out and not named.plans and limit == math.inf:
        _plan_any(named, part, clock)
    return named


def candidates_of(part: Part) -> list[Attempts]:
    """Return every named schedule, number of devices and of stages that is tried, the simplest first."""
    return [attempts for line in _series_of(part) for attempts in line.left]


def _in_turn(series: _Series) -> tuple[int, int, float]:
    """The most devices first, then the fewest stages, as they are planned sooner, then those that are likely faster."""
    candidate = series.left[0][0]
    return -candidate.devices, candidate.chunks, candidate.likely_step


def _series_of(part: Part) -> list[_Series]:
    request, most, layers = part.request, part.most_devices, len(part.profile.layers)
    found = []
    for name in request.schedules:
        chunks_of = request.chunks_of(name)
        for chunks, choice in product(chunks_of, request.mode_choices):
            numbers = _device_numbers(most, layers)
            if request.stages != "auto":
                devices, rest = divmod(request.stages, chunks)
                numbers = [devices] if not rest and 0 < devices <= most else []
            possible = [own for own in numbers if own * chunks <= layers and (own > 1 or chunks == 1)]
            attempts = [
                tuple(Candidate(part, costs, name, chunks, devices, choice) for costs in part.costs)
                for devices in possible or numbers[:1]  # the latter says why it is impossible
            ]
            if attempts:
                is_default = chunks == chunks_of[0] and choice == request.mode_choices[0]
                if most > _FEW_DEVICES and chunks != chunks_of[0]:
                    attempts = attempts[:1]
                found.append(_Series(attempts, is_default))
    return found


def _device_numbers(most: int, layers: int) -> list[int]:
    """Return numbers of devices to try, up to ``most``, the largest first.

    Each number up to four. Above, the largest two, and those with which equal stages have fewer layers than with one
    device less: about the square root of the number of layers.
    """
    steps = {-(-layers // each) for each in range(1, layers + 1)}
    few = range(1, min(most, _FEW_DEVICES) + 1)
    numbers = {most, max(most - 1, 1), *few, *(number for number in steps if number < most)}
    if len(numbers) > _MOST_NUMBERS:
        numbers = {*sorted(numbers)[:: -(-len(numbers) // _MOST_NUMBERS)], most}
    return sorted(numbers, reverse=True)


def _is_cheap(candidate: Candidate) -> bool:
    return candidate.size <= _CHEAP_SIZE and candidate.costs.layers <= _CHEAP_LAYERS


def by_affordability(attempts: Sequence[Attempts]) -> list[Attempts]:
    """Return those first that are planned in a fraction of a second, on the most devices."""

    def key(own: Attempts) -> tuple[float, int, float]:
        candidate = own[0]
        seconds = max(candidate.planning_seconds, _AFFORDABLE_SECONDS)
        return seconds, -candidate.devices, candidate.shortest_possible_step

    return sorted(attempts, key=key)


def _plan_any(named: Named, part: Part, clock: Clock) -> None:
    """Plan a few candidates without a search until there is one plan."""
    for own in by_affordability([own for own in candidates_of(part) if own[0].has_cuts])[:_TRIES]:
        if named.plan(own, math.inf, clock) is not None:
            return


def find_plan(candidate: Candidate, limit: float = math.inf, clock: Clock | None = None) -> Outcome | None:
    """Return the plan of a candidate, or bounds of its step if they prove that it takes ``limit`` or more; else None.

    Args:
        candidate: to plan.
        limit: seconds of another plan.
        clock: that ends the search for cuts.
    """
    clock = clock or Clock()
    if _is_no_less(candidate.shortest_possible_step, limit):
        return Outcome(
            None, candidate.shortest_possible_step, math.inf, is_searched=False
        )  # before a schedule is built
    search = CutSearch(candidate, clock)
    if math.isfinite(limit) and not candidate.impossible_reason:
        with suppress(OutOfTime):
            at_least = search.step_with_least_bottleneck()
            if _is_no_less(at_least, limit):
                return Outcome(None, at_least, math.inf, is_searched=False)
    cuts, bound = search.best_cuts()
    if not cuts:
        return None
    if math.isfinite(limit):
        at_least = candidate.least_with_splits(cuts)
        if _is_no_less(at_least, limit):
            return Outcome(None, at_least, cuts[0].seconds if candidate.is_exact else math.inf)
    plan = _plan_of_best(candidate, cuts, bound, clock)
    if plan is None:
        return None
    if clock.has(candidate.planning_seconds / 2):
        plan = with_split_critical(plan, candidate.costs)
    return Outcome(plan, plan.predicted.step_seconds, plan.predicted.step_seconds)


def _is_no_less(seconds: float, limit: float) -> bool:
    return seconds >= limit * (1 - TOLERANCE)


def _plan_of_best(
    candidate: Candidate, cuts: Sequence[EvaluatedCut], bound: float, clock: Clock
) -> Plan | None:
    """Return the fastest plan of cuts; None if none fits.

    Memory of cuts is counted as if all stages took equal times. More messages may wait in a plan's own step: if no plan
    fits, the devices that are short save more memory.
    """
    best: Plan | None = None
    drafts: list[Plan] = []
    for cut in cuts:
        if drafts and not clock.has(candidate.planning_seconds / 2):
            break
        draft = candidate.plan_of(cut.borders, cut.order, bound)
        drafts.append(draft)
        if not draft.fits:
            continue
        if best is None or draft.predicted.step_seconds < best.predicted.step_seconds * (1 - TOLERANCE):
            best = draft
        if candidate.is_exact or len(drafts) >= _SIMULATED:
            break
    for draft in () if best else drafts[:1]:
        best = _with_less_memory(draft, candidate)
    return best


def _with_less_memory(plan: Plan, candidate: Candidate) -> Plan | None:
    """Return the plan with modes of less memory on the devices that are short; None if that is not enough."""
    modes = MODE_SETS[candidate.choice]
    for _ in modes[1:]:
        needs = zip(plan.cluster.devices, plan.predicted.memory_bytes, strict=True)
        short = {device.name for device, need in needs if need > (device.memory_bytes or math.inf)}
        if not short:
            break
        homes = list(zip(*[[stage.device for stage in plan.stages], *plan.replica_devices], strict=True))
        stages = [
            stage.with_mode(modes[min(modes.index(stage.mode) + 1, len(modes) - 1)])
            if short.intersection(own) and stage.backward_seconds
            else stage
            for stage, own in zip(plan.stages, homes, strict=True)
        ]
        plan = plan.model_copy(update={"stages": tuple(stages)}).predict(candidate.costs)
    return plan if plan.fits else None
