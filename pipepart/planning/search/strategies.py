"""Chooses the best plan: plans named schedules and runs the joint search for each part of the request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from schedules.searching.allowance import OPERATIONS_PER_SECOND, Allowance
from schedules.searching.clock import Clock

from ..costs.layer_ranges import TOLERANCE
from ..infeasible import Infeasible
from ..joint.search import search_jointly
from ..plans.plan import Plan
from ..plans.searched_order import SEARCH
from ..request import Request
from .alternatives import list_alternatives
from .cut_search import CutSearch
from .named import Named, by_affordability, candidates_of, find_named
from .parts import Part, parts_of
from .search_order import as_searched

_STARTS = 4  # named plans that the joint search starts from, each with a different placement
SECONDS = 10.0  # time of a search, if the request does not set it
# A request without ``seconds`` has a fixed effort if it has no more layers and devices than these. Named schedules stop
# when the planning seconds of their candidates add up to this, for each part; most parts take a third of it.
_SHORT_LAYERS, _SHORT_DEVICES, _SHORT_EFFORT = 50, 16, 2.0
_SHORT_OPERATIONS = 300_000  # of the joint search, for each part of such a request: about 0.4 seconds
# With more devices than the first number, the parts of such a request share the effort of as many parts as the second.
_FEW_DEVICES, _FULL_PARTS = 4, 4

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Searched:
    """The result of the search of one part.

    Attributes:
        part: the part of the request.
        named: the results of the named schedules.
        joint: the plan of the joint search; None if it is not faster than all plans in ``named``.
    """

    part: Part
    named: Named
    joint: Plan | None

    @property
    def plans(self) -> list[Plan]:
        """All plans of the part."""
        named = [plan for _, plan in self.named.plans]
        return [*named, self.joint] if self.joint else named


def search(request: Request, clock: Clock, progress: Progress = lambda done: None) -> Plan | None:
    """Return the plan with the shortest step, with the other plans as its alternatives; None if no plan fits.

    The plan of a part does not depend on the other parts, and each part tries every candidate that could be faster. So
    allowing more schedules, numbers of micro-batches or replicas never makes the plan slower, unless the clock is over.

    Args:
        request: the schedules, numbers of micro-batches, replicas and stages to choose from.
        clock: limits the search. If some plan fits, one plan is made even after the clock is over.
        progress: is called with the share of the work that is done, from 0 to 1.
    """
    parts = sorted(parts_of(request), key=lambda part: part.shortest_possible_step)
    searched: list[Searched] = []
    for number, part in enumerate(parts):
        fastest = min(
            (plan.predicted.step_seconds for result in searched for plan in result.plans), default=math.inf
        )
        if part.shortest_possible_step >= fastest * (1 - TOLERANCE):
            slower = [(attempts[0], part.shortest_possible_step) for attempts in candidates_of(part)]
            searched.append(Searched(part, Named(slower=slower), None))
            continue
        progress(number / len(parts))
        # With a fixed effort the time is not divided among the parts.
        is_short = _is_short(request)
        part_clock = clock if is_short else clock.part(1 / (len(parts) - number))
        named_clock = part_clock.part(0.5) if request.searches_orders and not is_short else part_clock
        # The joint search starts from the named plans of the part. While there is time, these ignore other parts.
        limit = fastest if part_clock.is_over else math.inf
        effort = _SHORT_EFFORT * _share_of_effort(request, len(parts)) if is_short else math.inf
        named = find_named(part, named_clock, limit, effort)

        def tell(done: float, _: float = 0.0, number: int = number) -> None:
            progress((number + (1 + done) / 2) / len(parts))

        tell(0.0)
        joint = None if part_clock.is_over else _joint(part, named, part_clock, len(parts), tell)
        searched.append(Searched(part, named, joint))
    plans = [plan for result in searched for plan in result.plans]
    if not plans:
        return None
    best = _best(plans)
    if request.schedule == SEARCH and best.schedule != SEARCH:
        best = as_searched(best)
    joint = [result.joint for result in searched if result.joint and result.joint is not best]
    others = list_alternatives(
        best, [result.named for result in searched], joint if _is_short(request) else ()
    )
    return best.model_copy(update={"alternatives": others, "out_of_time": clock.cut_short})


def infeasible_candidates(request: Request, clock: Clock) -> Iterator[Infeasible]:
    """Explain why candidates have no plan: for each schedule, the candidates with the fewest stages per device.

    Candidates on fewer devices need more memory on each device, so they are left out if a cut on more devices is
    possible. Candidates that take more time than the clock has left are left out, unless that leaves out all of them.
    """
    parts, explained = list(parts_of(request)), False
    for part in parts:
        done: set[str] = set()  # schedules whose nearest cut has a memory deficit
        for attempts in candidates_of(part):
            for candidate in attempts:
                if candidate.schedule in done or not clock.has(candidate.planning_seconds):
                    continue
                explained = True
                reason = CutSearch(candidate, clock).explain()
                if reason.deficit_bytes:
                    done.add(candidate.schedule)
                yield reason
    for attempts in by_affordability(candidates_of(parts[0])) if not explained else ():
        yield CutSearch(attempts[0], clock).explain()
        return


def _joint(
    part: Part, named: Named, clock: Clock, parts: int, tell: Callable[[float, float], None]
) -> Plan | None:
    """Run the joint search, with tied layers in one stage if possible; None if its plan is no faster than ``named``."""
    request = part.request
    if not request.searches_orders or part.groups.replicas > part.costs[0].micro_batches:
        return None
    together, costs = part.costs[0], part.costs[-1]
    most_together = len(together.allowed_borders) + 1  # stages of a cut that keeps tied layers together
    if most_together >= part.most_devices:
        costs = together
    starts: dict[tuple[int, ...], Plan] = {}
    for candidate, plan in sorted(named.plans, key=lambda pair: pair[1].predicted.step_seconds):
        if candidate.costs is costs:
            starts.setdefault(plan.build_schedule().device_of, plan)
    allowance = Allowance(_operations(request, parts), clock, tell)
    plan = search_jointly(part.joint(costs), list(starts.values())[:_STARTS], allowance)
    if plan is None or plan.predicted.step_seconds >= named.fastest * (1 - TOLERANCE):
        return None
    if costs is not together and len(plan.stages) <= most_together:
        return None  # as many stages may keep tied layers together
    return plan


def _is_short(request: Request) -> bool:
    """Return True if the request gets a fixed effort, which takes a few seconds on any machine."""
    layers, devices = len(request.profile.layers), len(request.cluster)
    return request.seconds is None and layers <= _SHORT_LAYERS and devices <= _SHORT_DEVICES


def _share_of_effort(request: Request, parts: int) -> float:
    """Return the share (0 to 1) of its fixed effort that each part of a short request gets."""
    return min(1.0, _FULL_PARTS / parts) if len(request.cluster) > _FEW_DEVICES else 1.0


def _operations(request: Request, parts: int) -> int:
    """Return the most operations of the joint search of a part. They do not depend on the speed of the machine."""
    if _is_short(request):
        return int(_SHORT_OPERATIONS * _share_of_effort(request, parts))
    return int((request.seconds or SECONDS) * OPERATIONS_PER_SECOND / parts)


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
