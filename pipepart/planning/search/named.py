"""Plans each named schedule, for a fixed number of micro-batches and of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from schedules.searching.clock import Clock

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

_FEW_DEVICES = 4  # up to this many devices, try each number
_MOST_DEVICE_COUNTS = 24  # numbers of devices to try for each schedule
_EFFORT_WITHOUT_PLAN = 2.0  # times the effort, which is added if no plan fits
# Candidates up to this size (stages times micro-batches) and these layers take about 20 ms to plan. They are planned
# even after the clock is over.
_CHEAP_SIZE, _CHEAP_LAYERS = 128, 64
_AFFORDABLE_SECONDS = 0.35  # candidates that take less time to plan count as equally cheap
_TRIES = 3  # candidates to plan after the clock is over, until a plan fits
_SIMULATED = 3  # cuts of a candidate to simulate, if their evaluated seconds are not exact


class Outcome(NamedTuple):
    """The result of planning a candidate.

    Attributes:
        plan: None if a bound proves that the candidate is not faster than the limit.
        at_least: a lower bound of its step in seconds.
        is_searched: False if no cut was searched.
    """

    plan: Plan | None
    at_least: float
    is_searched: bool = True


@dataclass
class Named:
    """The results for the candidates of one part of a request.

    Attributes:
        plans: candidates that were planned to the end, with their plans.
        slower: candidates that were not planned to the end, with a lower bound of their step in seconds. Another plan
            is faster, or the clock was over.
        failed: candidates without a plan that fits.
    """

    plans: list[tuple[Candidate, Plan]] = field(default_factory=list)
    slower: list[tuple[Candidate, float]] = field(default_factory=list)
    failed: list[Candidate] = field(default_factory=list)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest step of all plans; infinite if there is no plan."""
        return min((plan.predicted.step_seconds for _, plan in self.plans), default=math.inf)

    def plan(self, attempts: Attempts, limit: float, clock: Clock) -> Outcome | None:
        """Plan the first attempt that fits; None if no attempt fits.

        The outcome has no plan if a bound proves that its step takes ``limit`` seconds or more.
        """
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


def find_named(part: Part, clock: Clock, limit: float = math.inf, effort: float = math.inf) -> Named:
    """Plan the candidates that may be the fastest.

    With up to four devices a candidate is cut short only if a lower bound proves that it is slower than a known plan.
    So allowing more schedules never makes the fastest plan slower, unless the clock is over.

    Args:
        part: of a request.
        clock: after its end, only cheap candidates with the most devices are planned, one for each schedule.
        limit: seconds of the step of a known plan.
        effort: stop when the ``effort_seconds`` of the planned candidates add up to this, or to three times as much
            if no plan fits until then. It does not depend on the speed of the machine.
    """
    named = Named()
    tried, left_out = set[str](), False
    least_effort = -_EFFORT_WITHOUT_PLAN * effort
    # All schedules on the most devices first: plans stay on them if fewer are as fast.
    for attempts in sorted(candidates_of(part), key=_priority):
        candidate = attempts[0]
        is_first = candidate.schedule not in tried
        tried.add(candidate.schedule)
        if is_first and _is_cheap(candidate):
            outcome = named.plan(attempts, math.inf, Clock())  # to the end, for the list of alternatives
        elif effort > (0.0 if named.plans else least_effort) and clock.has(candidate.planning_seconds):
            outcome = named.plan(attempts, min(limit, named.fastest), clock)
        else:
            named.slower.append((candidate, candidate.shortest_possible_step))
            left_out = True
            continue
        if outcome is None or outcome.is_searched:
            effort -= candidate.effort_seconds
    if left_out and not named.plans and limit == math.inf:
        _plan_any(named, part, clock)
    return named


def candidates_of(part: Part) -> list[Attempts]:
    """Return the attempts for every named schedule, set of modes and number of devices, the simplest first."""
    request, most, layers = part.request, part.most_devices, len(part.profile.layers)
    all_attempts = []
    for name, choice in product(request.schedules, request.mode_choices):
        chunks = request.chunks_of(name)
        if chunks is None:
            continue
        numbers = _device_numbers(most, layers)
        if request.stages != "auto":
            devices, rest = divmod(request.stages, chunks)
            numbers = [devices] if not rest and 0 < devices <= most else []
        possible = [count for count in numbers if count * chunks <= layers and (count > 1 or chunks == 1)]
        all_attempts += [
            tuple(Candidate(part, costs, name, chunks, devices, choice) for costs in part.costs)
            for devices in possible or numbers[:1]  # an impossible candidate tells the reason
        ]
    return all_attempts


def _priority(attempts: Attempts) -> tuple[int, int, float]:
    """Sort key: most devices first, then fewest stages (quick to plan), then the shortest likely step."""
    candidate = attempts[0]
    return -candidate.devices, candidate.chunks, candidate.likely_step


def _device_numbers(most: int, layers: int) -> list[int]:
    """Return numbers of devices to try, up to ``most``, the largest first.

    They are all numbers up to four, the largest two, and each number that makes equal stages have fewer layers than one
    device less would. The latter are about as many as the square root of the number of layers.
    """
    steps = {-(-layers // layers_per_stage) for layers_per_stage in range(1, layers + 1)}
    few = range(1, min(most, _FEW_DEVICES) + 1)
    numbers = {most, max(most - 1, 1), *few, *(number for number in steps if number < most)}
    if len(numbers) > _MOST_DEVICE_COUNTS:
        numbers = {*sorted(numbers)[:: -(-len(numbers) // _MOST_DEVICE_COUNTS)], most}
    return sorted(numbers, reverse=True)


def _is_cheap(candidate: Candidate) -> bool:
    return candidate.size <= _CHEAP_SIZE and candidate.costs.layers <= _CHEAP_LAYERS


def by_affordability(attempts: Sequence[Attempts]) -> list[Attempts]:
    """Sort attempts by the time to plan them, and by the most devices where that time is short."""

    def key(candidates: Attempts) -> tuple[float, int, float]:
        candidate = candidates[0]
        seconds = max(candidate.planning_seconds, _AFFORDABLE_SECONDS)
        return seconds, -candidate.devices, candidate.shortest_possible_step

    return sorted(attempts, key=key)


def _plan_any(named: Named, part: Part, clock: Clock) -> None:
    """Plan a few candidates, without a search for cuts, until a plan fits."""
    possible = [attempts for attempts in candidates_of(part) if attempts[0].has_cuts]
    for attempts in by_affordability(possible)[:_TRIES]:
        if named.plan(attempts, math.inf, clock) is not None:
            return


def find_plan(candidate: Candidate, limit: float = math.inf, clock: Clock | None = None) -> Outcome | None:
    """Plan a candidate; None if no plan fits.

    The outcome has bounds of the step and no plan if they prove that the step takes ``limit`` seconds or more.

    Args:
        candidate: to plan.
        limit: seconds of the step of another plan.
        clock: ends the search for cuts.
    """
    clock = clock or Clock()
    if _is_no_faster(candidate.shortest_possible_step, limit):
        # Checked first: no schedule is built yet.
        return Outcome(None, candidate.shortest_possible_step, is_searched=False)
    cuts, bound = CutSearch(candidate, clock).best_cuts()
    if not cuts:
        return None
    if math.isfinite(limit):
        at_least = candidate.least_with_splits(cuts)
        if _is_no_faster(at_least, limit):
            return Outcome(None, at_least)
    plan = _plan_of_best(candidate, cuts, bound, clock)
    if plan is None:
        return None
    if clock.has(candidate.planning_seconds / 2):
        plan = with_split_critical(plan, candidate.costs)
    return Outcome(plan, plan.predicted.step_seconds)


def _is_no_faster(seconds: float, limit: float) -> bool:
    return seconds >= limit * (1 - TOLERANCE)


def _plan_of_best(
    candidate: Candidate, cuts: Sequence[EvaluatedCut], bound: float, clock: Clock
) -> Plan | None:
    """Return the fastest plan of these cuts; None if no plan fits.

    Cuts count memory as if all stages took equal times. In the simulated step of a plan more messages may wait. If no
    plan fits for that reason, devices without enough memory switch to modes that need less.
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
    """Switch devices without enough memory to modes that need less; None if the plan still does not fit."""
    modes = MODE_SETS[candidate.choice]
    for _ in modes[1:]:
        needs = zip(plan.cluster.devices, plan.predicted.memory_bytes, strict=True)
        short = {device.name for device, need in needs if need > (device.memory_bytes or math.inf)}
        if not short:
            break
        homes = list(zip(*[[stage.device for stage in plan.stages], *plan.replica_devices], strict=True))
        stages = [
            stage.with_mode(modes[min(modes.index(stage.mode) + 1, len(modes) - 1)])
            if short.intersection(names) and stage.backward_seconds
            else stage
            for stage, names in zip(plan.stages, homes, strict=True)
        ]
        plan = plan.model_copy(update={"stages": tuple(stages)}).predict(candidate.costs)
    return plan if plan.fits else None
