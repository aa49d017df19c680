"""Chooses the best plan: for each number of micro-batches and replicas the named schedules, then the joint search."""

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

_STARTS = 4  # named plans that the joint search starts from, each with another placement
SECONDS = 10.0  # of a search, if the request does not say how many
# Of a request with no more layers and devices that does not say how many seconds: what named schedules may take for
# each number of micro-batches and replicas, as planning seconds of candidates. Most of them take a third of that.
_SHORT_LAYERS, _SHORT_DEVICES, _SHORT_EFFORT = 50, 16, 2.0
_SHORT_OPERATIONS = 300_000  # of the joint search for each part of such a request: about 0.4 seconds

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Searched:
    """The result of one part.

    Attributes:
        part: that was searched.
        named: what was found under named schedules.
        joint: the plan of the joint search if it is faster than all of these.
    """

    part: Part
    named: Named
    joint: Plan | None

    @property
    def plans(self) -> list[Plan]:
        """All plans that were found."""
        found = [plan for _, plan in self.named.plans]
        return [*found, self.joint] if self.joint else found


def search(request: Request, clock: Clock, progress: Progress = lambda done: None) -> Plan | None:
    """Return the plan with the shortest step, with the others as its alternatives; None if none fits.

    The plan of a part does not depend on the other parts, and no candidate of a part is left out that could be faster.
    So a plan is no slower than one whose request allows fewer schedules, numbers of micro-batches or replicas, unless
    the clock is over.

    Args:
        request: what to choose from.
        clock: that the search looks at. One plan is made even after it, if one fits.
        progress: is called with the part of the work that is done, from 0 to 1.
    """
    parts = sorted(parts_of(request), key=lambda part: part.shortest_possible_step)
    searched: list[Searched] = []
    for number, part in enumerate(parts):
        fastest = min(
            (plan.predicted.step_seconds for one in searched for plan in one.plans), default=math.inf
        )
        if part.shortest_possible_step >= fastest * (1 - TOLERANCE):
            slower = [(attempts[0], part.shortest_possible_step) for attempts in candidates_of(part)]
            searched.append(Searched(part, Named(slower=slower), None))
            continue
        progress(number / len(parts))
        # With a fixed effort the parts need no shares of the time.
        is_short = _is_short(request)
        own_clock = clock if is_short else clock.part(1 / (len(parts) - number))
        named_clock = own_clock.part(0.5) if request.searches_orders and not is_short else own_clock
        # The joint search of a part starts from its named plans: they do not depend on other parts, if there is time.
        limit = fastest if own_clock.is_over else math.inf
        named = find_named(part, named_clock, limit, _SHORT_EFFORT if is_short else math.inf)

        def tell(done: float, _: float = 0.0, number: int = number) -> None:
            progress((number + (1 + done) / 2) / len(parts))

        tell(0.0)
        joint = None if own_clock.is_over else _joint(part, named, own_clock, len(parts), tell)
        searched.append(Searched(part, named, joint))
    plans = [plan for one in searched for plan in one.plans]
    if not plans:
        return None
    best = _best(plans)
    if request.schedule == SEARCH and best.schedule != SEARCH:
        best = as_searched(best)
    joint = [one.joint for one in searched if one.joint and one.joint is not best]
    others = list_alternatives(best, [one.named for one in searched], joint if _is_short(request) else ())
    return best.model_copy(update={"alternatives": others, "out_of_time": clock.cut_short})


def infeasible_candidates(request: Request, clock: Clock) -> Iterator[Infeasible]:
    """Explain why candidates have no plan: under each schedule those with the fewest stages a device.

    Those on fewer devices need more memory on each, so they are left out if a cut for others is possible. So are those
    that take longer than the clock has left, if others do not.
    """
    parts, explained = list(parts_of(request)), False
    for part in parts:
        done: set[str] = set()  # schedules with a cut that lacks some bytes
        for attempts in candidates_of(part):
            for candidate in attempts:
                if candidate.schedule in done or not clock.has(candidate.planning_seconds):
                    continue
                explained = True
                found = CutSearch(candidate, clock).explain()
                if found.deficit_bytes:
                    done.add(candidate.schedule)
                yield found
    for attempts in by_affordability(candidates_of(parts[0])) if not explained else ():
        yield CutSearch(attempts[0], clock).explain()
        return


def _joint(
    part: Part, named: Named, clock: Clock, parts: int, tell: Callable[[float, float], None]
) -> Plan | None:
    """Return the plan of the joint search, which keeps tied layers together if it may; None if it is not faster."""
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
    """Return True if named schedules get a fixed effort, so that the request takes few seconds on any machine."""
    layers, devices = len(request.profile.layers), len(request.cluster)
    return request.seconds is None and layers <= _SHORT_LAYERS and devices <= _SHORT_DEVICES


def _operations(request: Request, parts: int) -> int:
    """Return what the joint search of one part may take. It does not depend on the speed of the machine."""
    if _is_short(request):
        return _SHORT_OPERATIONS
    return int((request.seconds or SECONDS) * OPERATIONS_PER_SECOND / parts)


def _best(plans: Sequence[Plan]) -> Plan:
    """Return the fastest; of equal ones that with fewest replicas, most devices, fewest chunks, least memory."""
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
