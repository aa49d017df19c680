"""Chooses the best plan: plans the candidates of a request one by one, then runs the joint search from the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import schedules
from schedules.searching.allowance import OPERATIONS_PER_SECOND, Allowance
from schedules.searching.clock import Clock

from ...input_error import InputError
from ..costs.layer_ranges import TOLERANCE
from ..infeasible import Infeasible
from ..joint.search import search_jointly
from ..partition.local_search import EvaluatedCut
from ..plans.plan import Plan
from ..plans.searched_order import SEARCH, order_text
from ..request import Request
from .alternatives import list_alternatives
from .candidate import Candidate, candidates_of
from .cut_search import CutSearch, plan_of_cut
from .parts import FEW_DEVICES, Part, parts_of

SECONDS = 10.0  # time of a search, if the request does not set it
# A request without ``seconds`` gets a fixed effort if it has no more layers and devices than these: estimated seconds
# of its candidates, and operations of the joint search. The clock ends the search of other requests.
_SHORT_LAYERS, _SHORT_DEVICES = 50, 16
_SHORT_EFFORT, _SHORT_OPERATIONS = 0.9, 200_000
_LIMITED_FACTOR = 1.3  # times the effort if memory is limited: many candidates have no plan
# Share of the effort, beside it, for schedules that were not tried on as many devices as the best plan has.
_OTHERS_SHARE = 0.3
_JOINT_STARTS = 4  # plans that the joint search starts from, each with a different placement
_OTHER_SCHEDULES = 4  # schedules to plan besides the best, for the list of alternatives
_LAST_TRIES = 3  # candidates to plan if none that was affordable fits: cheap ones, then frugal ones
_CHEAP_SECONDS = 0.35  # candidates that take less time to plan count as equally cheap
_GRACE_SECONDS = 0.5  # candidates that take less time to plan are tried or explained when the clock is over


class _Results:
    """What is known of the candidates of a request so far.

    Attributes:
        plans: candidates with their plans.
        unfinished: candidates without a plan, with a lower bound of their step in seconds.
        failed: candidates for which no plan fits.
    """

    def __init__(self) -> None:
        # Of unfinished candidates, if they were searched.
        self._cuts: dict[Candidate, EvaluatedCut] = {}
        self.plans: dict[Candidate, Plan] = {}
        self.unfinished: dict[Candidate, float] = {}
        self.failed: list[Candidate] = []

    @property
    def fastest(self) -> float:
        """Seconds of the fastest step; infinite without a plan."""
        return min((plan.predicted.step_seconds for plan in self.plans.values()), default=math.inf)

    def can_beat(self, bound: float) -> bool:
        """Return True if a plan with this lower bound of its step may be the fastest."""
        return bound < self.fastest * (1 - TOLERANCE)

    def try_candidate(self, candidate: Candidate, clock: Clock) -> None:
        """Search the best cut of a candidate. Make its plan if that may be the fastest."""
        cut = CutSearch(candidate, clock).best_cut()
        least = cut.seconds + candidate.cluster.step_seconds if cut else math.inf
        if cut and not self.can_beat(least):
            self.unfinished[candidate], self._cuts[candidate] = least, cut
        else:
            self._make_plan(candidate, cut)

    def best_first(self) -> list[Candidate]:
        """Return the candidates with cuts: the shortest step first, or the lowest bound of a step without a plan."""
        seconds = {candidate: plan.predicted.step_seconds for candidate, plan in self.plans.items()}
        seconds |= {candidate: self.unfinished[candidate] for candidate in self._cuts}
        return sorted(seconds, key=seconds.__getitem__)

    def finish(self, candidate: Candidate) -> Plan | None:
        """Return the plan of a candidate with cuts, made now if there is none yet; None if no plan fits."""
        if candidate in self._cuts:
            del self.unfinished[candidate]
            self._make_plan(candidate, self._cuts.pop(candidate))
        return self.plans.get(candidate)

    def _make_plan(self, candidate: Candidate, cut: EvaluatedCut | None) -> None:
        plan = plan_of_cut(candidate, cut) if cut else None
        if plan is None:
            self.failed.append(candidate)
        else:
            self.plans[candidate] = plan

    def plan_others(self, clock: Clock) -> None:
        """Make the plans of a few other schedules, to list them with their figures."""
        for candidate in self.best_first():
            names = {planned.schedule for planned in self.plans}
            if len(names) > _OTHER_SCHEDULES or clock.seconds_left < candidate.simulation_seconds:
                return
            if candidate.schedule not in names:
                self.finish(candidate)


@dataclass(frozen=True)
class NoPlan:
    """A search that found no plan that fits.

    Attributes:
        request: what was asked.
        failed: the candidates that were searched.
        parts: all parts of the request.
        clock: limits the search, and the explanation.
    """

    request: Request
    failed: Sequence[Candidate]
    parts: Sequence[Part]
    clock: Clock

    def explain(self) -> Plan | Infeasible:
        """Explain why no plan fits, for the candidate that lacks the least memory of those for which there is time.

        If no candidate was searched, as if the devices do not hold the weights, the cheapest candidate is explained.
        If the nearest plan fits, it is returned: with skip connections the cut search overestimates memory.

        Raises:
            ValueError: no schedule of the request has as many stages as it asks for.
        """
        candidates = self.failed or [each for part in self.parts for each in candidates_of(part)]
        if not candidates:
            asked = self.request
            raise InputError(
                f"schedule {asked.schedule!r} has no {asked.stages} stages on any number of the "
                f"{len(asked.cluster)} devices"
            )
        # The cuts of candidates that failed are known, and their steps are not simulated yet.
        affordable = [each for each in self.failed if self.clock.has(each.simulation_seconds)]
        if not affordable:
            affordable = (_cheapest(candidates) or candidates)[:1]
            if not _in_grace(affordable[0], self.clock):
                return Infeasible(affordable[0].too_slow)
        nearest = min((CutSearch(each, self.clock) for each in affordable), key=lambda search: search.deficit)
        reason = nearest.explain()
        return reason.plan if reason.plan is not None and reason.plan.fits else reason


def search(request: Request, clock: Clock, *, answers: bool = True) -> Plan | NoPlan:
    """Return the plan with the shortest step, with the other plans as its alternatives.

    Args:
        request: the schedules, numbers of micro-batches, replicas and stages to choose from.
        clock: limits the search.
        answers: try one candidate even if the clock is over, unless that takes long.

    Raises:
        OutOfTime: the clock is over before any candidate is known, and ``answers`` is False.
    """
    all_parts, of_parts = [], []
    for part in parts_of(request):
        all_parts.append(part)
        if not answers:
            clock.check()
        if part.holds_weights:
            of_parts.append((part, _in_order(candidates_of(part))))
    of_parts.sort(key=lambda each: each[0].least_seconds(each[0].most_devices))
    parts = [part for part, _ in of_parts]
    # The parts take turns.
    turns = zip_longest(*(candidates for _, candidates in of_parts))
    candidates = [candidate for turn in turns for candidate in turn if candidate is not None]
    results = _plan_candidates(request, candidates, clock, answers)
    joint = _search_jointly(request, parts, results, clock)
    if results.plans:
        results.plan_others(clock)
    plans = [*results.plans.values(), *([joint] if joint else [])]
    if not plans:
        return NoPlan(request, results.failed, all_parts, clock)
    best = _best(plans)
    for candidate, plan in results.plans.items():
        if plan is best:
            best = CutSearch(candidate, clock).with_bound(plan)
    if request.schedule == SEARCH and best.schedule != SEARCH:
        best = _as_searched(best)
    others = list_alternatives(best, results.plans, results.unfinished, results.failed)
    return best.model_copy(update={"alternatives": others, "out_of_time": clock.cut_short})


def _plan_candidates(
    request: Request, candidates: Sequence[Candidate], clock: Clock, answers: bool
) -> _Results:
    """Plan the candidates that may be the fastest, in this order, as long as the effort lasts."""
    results = _Results()
    factor = _LIMITED_FACTOR if any(candidate.is_limited for candidate in candidates) else 1.0
    effort = factor * _effort_seconds(request)
    if request.searches_orders:
        clock = clock.part(0.5)
    skipped = _try_in_turn(results, candidates, effort, clock)
    if results.plans:
        others = _first_of_others(results, skipped)
        done = {*others}.difference(_try_in_turn(results, others, _OTHERS_SHARE * effort, clock))
        skipped = [candidate for candidate in skipped if candidate not in done]

    def try_also(candidate: Candidate) -> None:
        results.try_candidate(candidate, clock)
        skipped.remove(candidate)

    # 1F1B needs little memory, so it is planned even if the effort is spent.
    if all(each.schedule != "1f1b" for each in results.plans):
        for candidate in _limited("1f1b", skipped, clock)[:1]:
            try_also(candidate)
    for candidate in _cheapest(skipped)[:_LAST_TRIES]:
        must_try = answers and not results.failed and _in_grace(candidate, clock)
        if not results.plans and (must_try or clock.has(candidate.simulation_seconds)):
            try_also(candidate)
    # "sequential" needs the least memory, and has the shortest step on the fewest and fastest devices that hold it.
    if all(each.schedule == "sequential" for each in results.plans):
        for candidate in sorted(_limited("sequential", skipped, clock), key=_most_spread)[:_LAST_TRIES]:
            try_also(candidate)
            if not results.plans:
                break
    results.unfinished |= {candidate: candidate.bound for candidate in skipped}
    return results


def _try_in_turn(
    results: _Results, candidates: Iterable[Candidate], effort: float, clock: Clock
) -> list[Candidate]:
    """Plan the candidates that may be the fastest; return those for which the effort in seconds was too small."""
    skipped: list[Candidate] = []
    for candidate in candidates:
        if not results.can_beat(candidate.bound):
            results.unfinished[candidate] = candidate.bound
        elif candidate.effort_seconds > effort or not clock.has(candidate.simulation_seconds):
            skipped.append(candidate)
        elif not candidate.impossible_reason:
            results.try_candidate(candidate, clock)
            effort -= candidate.effort_seconds
    return skipped


def _first_of_others(results: _Results, skipped: Iterable[Candidate]) -> list[Candidate]:
    """Return one candidate of each schedule that was not tried on as many devices as the best plan, likeliest first.

    Under tight memory the likeliest schedules often do not fit, or only with recomputes.
    """
    best = results.best_first()[0]
    tried = {
        each.schedule
        for each in (*results.plans, *results.unfinished, *results.failed)
        if each.devices == best.devices
    }
    first: dict[str, Candidate] = {}
    for candidate in sorted(skipped, key=lambda candidate: candidate.likely_step):
        if candidate.devices == best.devices and candidate.schedule not in tried:
            first.setdefault(candidate.schedule, candidate)
    return [*first.values()]


def _search_jointly(request: Request, parts: Iterable[Part], results: _Results, clock: Clock) -> Plan | None:
    """Run the joint search from the best plans of the part with the best plan; return a faster plan, or None.

    A second part took a sixth of the time of a call, and gave a faster plan in 2 of 40 requests, by 0.3 and 2.2 %.
    """
    ranked = results.best_first()
    best_first = [*(candidate.part for candidate in ranked), *parts]
    part = next((part for part in best_first if part.groups.replicas <= part.costs.micro_batches), None)
    if part is None or not request.searches_orders or clock.is_over:
        return None
    starts: dict[tuple[int, ...], Plan] = {}
    for candidate in ranked:
        if candidate.part is not part or len(starts) == _JOINT_STARTS:
            continue
        placement = candidate.bare_schedule.device_of
        if placement not in starts and (plan := results.finish(candidate)) is not None:
            starts[placement] = plan
    seconds = request.seconds or SECONDS
    operations = _SHORT_OPERATIONS if _is_short(request) else int(seconds * OPERATIONS_PER_SECOND)
    return search_jointly(part, list(starts.values()), Allowance(operations, clock))


def _effort_seconds(request: Request) -> float:
    """Return the estimated CPU seconds to spend on candidates. On few devices they are enough for nearly all."""
    if not _is_short(request):
        return math.inf  # only the clock ends the search
    return _SHORT_EFFORT * (min(len(request.micro_batches), 2) if len(request.cluster) <= FEW_DEVICES else 1)


def _in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates by likely step, in turns of all numbers of devices and of stages a device, most devices first.

    The effort of a request may end the search, so each number of devices gets its likeliest schedules before any gets
    the others.
    """
    turn: dict[Candidate, int] = {}
    classes: dict[tuple[int, int], int] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.likely_step):
        key = candidate.devices, candidate.chunks
        turn[candidate] = classes[key] = classes.get(key, 0) + 1
    return sorted(turn, key=lambda candidate: (turn[candidate], -candidate.devices, candidate.chunks))


def _limited(schedule: str, candidates: Iterable[Candidate], clock: Clock) -> list[Candidate]:
    """Return the candidates of a schedule under memory limits for which there is time."""
    of_schedule = (each for each in candidates if each.schedule == schedule and each.is_limited)
    return [each for each in of_schedule if clock.has(each.simulation_seconds)]


def _most_spread(candidate: Candidate) -> tuple[int, int, int]:
    """Sort first what has most devices for one copy of the model, and the smallest micro-batches."""
    return candidate.part.groups.replicas, -candidate.devices, -candidate.costs.micro_batches


def _cheapest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates by the time to plan them, and by the most devices where that time is short."""

    def key(candidate: Candidate) -> tuple[float, int, float]:
        return max(candidate.simulation_seconds, _CHEAP_SECONDS), -candidate.devices, candidate.bound

    return sorted((candidate for candidate in candidates if candidate.has_cuts), key=key)


def _in_grace(candidate: Candidate, clock: Clock) -> bool:
    """Return True if a candidate may be planned although the clock is over, or nearly."""
    return candidate.simulation_seconds < clock.seconds_left + _GRACE_SECONDS


def _is_short(request: Request) -> bool:
    """Return True if the request gets a fixed effort, which takes a few seconds on any machine."""
    layers, devices = len(request.profile.layers), len(request.cluster)
    return request.seconds is None and layers <= _SHORT_LAYERS and devices <= _SHORT_DEVICES


def _as_searched(plan: Plan) -> Plan:
    """Return the same plan under schedule "search", with the order of its named schedule written as actions."""
    replica = plan.first_replica
    order = schedules.build(replica.schedule, len(replica.workers), replica.micro_batches, replica.chunks)
    return plan.model_copy(update={"schedule": SEARCH, "chunks": 1, "actions": order_text(order)})


def _best(plans: Sequence[Plan]) -> Plan:
    """Return the fastest plan. Ties go to fewest replicas, then most devices, fewest chunks, least memory."""
    fastest = min(plan.predicted.step_seconds for plan in plans)
    near = [plan for plan in plans if plan.predicted.step_seconds <= fastest * (1 + TOLERANCE)]
    return min(
        near,
        key=lambda plan: (
            plan.replicas,
            -len({stage.device for stage in plan.stages}),
            plan.schedule == SEARCH,
            plan.chunks,
            max(plan.predicted.memory_bytes),
        ),
    )
