"""Chooses the best plan: for each number of micro-batches and replicas the named schedules, then the joint search."""

from __future__ import annotations

import math
import time
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
from .named import Named, Ways, find_named, plan_waiting
from .parts import Part, parts_of
from .search_order import as_searched

_STARTS = 4  # named plans that the joint search starts from, each with another placement
# A problem up to this size is small: layers, devices and micro-batches.
_SMALL = (50, 4, 16)
SECONDS = 10.0  # for a larger one
_SMALL_OPERATIONS = 300_000  # of the joint search for each part of a small one: about 0.2 seconds

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


def search(request: Request, progress: Progress = lambda done: None, share: int = 1) -> Plan | None:
    """Return the plan with the shortest step, with the others as its alternatives; None if none fits.

    The plan of a part does not depend on the other parts, and no candidate of a part is left out that could be faster.
    So a plan is no slower than one whose request allows fewer schedules, numbers of micro-batches, replicas, devices or
    stages, unless the time is up.

    Args:
        request: what to choose from.
        progress: is called with the part of the work that is done, from 0 to 1.
        share: the number of searches that share the time.
    """
    parts = sorted(parts_of(request), key=lambda part: part.shortest_possible_step)
    deadline = time.monotonic() + (SECONDS if request.seconds is None else request.seconds) / share
    searched: list[Searched] = []
    for number, part in enumerate(parts):
        fastest = min(
            (plan.predicted.step_seconds for one in searched for plan in one.plans), default=math.inf
        )
        if part.shortest_possible_step >= fastest * (1 - TOLERANCE):
            searched.append(Searched(part, Named(slower=part.bounds), None))
            continue
        late = math.isfinite(fastest) and time.monotonic() >= deadline
        operations = _operations(request, len(parts) * share)
        first = math.inf if _is_small(request) else operations // 8
        named = find_named(part.candidates, first, deadline, fastest if late else math.inf)
        if late:
            named.put_aside()
            searched.append(Searched(part, named, None))
            continue

        def tell(done: float, _: float = 0.0, number: int = number) -> None:
            progress((number + (1 + done) / 2) / len(parts))

        tell(0.0)
        joint = _joint(part, named, Allowance(operations, Clock(deadline - time.monotonic()), tell))
        limit = joint.predicted.step_seconds if joint else math.inf
        plan_waiting(named, limit, operations // 4, deadline)
        if named.fastest < limit * (
            1 - TOLERANCE
        ):  # one of those that waited, which the joint search does not know
            joint = None
        searched.append(Searched(part, named, joint))
    plans = [plan for one in searched for plan in one.plans]
    if not plans:
        return None
    best = _best(plans)
    joint = [one.joint for one in searched if one.joint and one.joint is not best]
    if request.schedule == SEARCH and best.schedule != SEARCH:
        best = as_searched(best)
    others = list_alternatives(best, [one.named for one in searched], joint if _is_small(request) else ())
    return best.model_copy(update={"alternatives": others, "out_of_time": time.monotonic() >= deadline})


def infeasible_candidates(request: Request, clock: Clock) -> Iterator[Infeasible]:
    """Explain why candidates have no plan: under each schedule those with the fewest stages a device.

    Those on fewer devices need more memory on each, so they are left out if a cut for others is possible. After the
    clock only the first of all is explained.
    """
    count = 0
    for part in parts_of(request):
        of_schedule: dict[str, list[Ways]] = {}
        for ways in part.candidates:
            of_schedule.setdefault(ways[0].schedule, []).append(ways)
        for every in of_schedule.values():
            for ways in every:
                if count and clock.is_over:
                    return
                found = [candidate.infeasible() for candidate in ways]
                count += len(found)
                yield from found
                if any(one.deficit_bytes for one in found):
                    break


def _joint(part: Part, named: Named, allowance: Allowance) -> Plan | None:
    if not part.request.searches_orders or part.groups.replicas > part.costs[0].micro_batches:
        return None
    starts: dict[tuple[int, ...], Plan] = {}
    for _, plan in sorted(named.plans, key=lambda one: one[1].predicted.step_seconds):
        starts.setdefault(plan.build_schedule().device_of, plan)
    return search_jointly(part.joint, list(starts.values())[:_STARTS], allowance)


def _operations(request: Request, parts: int) -> int:
    """Return what the joint search of one part may take. It does not depend on the speed of the machine."""
    if _is_small(request):
        return _SMALL_OPERATIONS
    return int((request.seconds or SECONDS) * OPERATIONS_PER_SECOND / parts)


def _is_small(request: Request) -> bool:
    size = len(request.profile.layers), len(request.cluster), max(request.micro_batches)
    return request.seconds is None and all(own <= most for own, most in zip(size, _SMALL, strict=True))


def _best(plans: Sequence[Plan]) -> Plan:
    """The fastest; of equal ones that with fewest replicas, most devices, fewest chunks, least memory; or the first."""
    fastest = min(made.predicted.step_seconds for made in plans)
    near = [made for made in plans if made.predicted.step_seconds <= fastest * (1 + TOLERANCE)]
    return min(
        near,
        key=lambda made: (
            made.replicas,
            -len({stage.device for stage in made.stages}),
            made.schedule == SEARCH,
            made.chunks,
            max(made.predicted.memory_bytes),
        ),
    )
