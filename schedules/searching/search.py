"""Searches a schedule for unequal stages, from their costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from random import Random

from ..core.action import ScheduleError
from ..core.costs import StageCosts
from ..core.placement import placements
from ..core.schedule import Schedule
from ..generators.catalog import GENERATORS, generate
from ..simulation.event_loop import play
from ..simulation.simulate import simulate
from ..transforms.passes import fuse_backward, permute_devices
from ..validation.check import check
from .allowance import Allowance
from .bounds import problem_bound
from .clock import Clock
from .dispatching import RULES, dispatch, dispatching_work
from .local_search import anneal_order, round_work
from .objectives import OBJECTIVES, check_objective, objective_seconds
from .problem import SLACK, Problem, Row, make_problem
from .split_critical import split_critical

_OPERATIONS, _OPERATIONS_EACH = 1_000_000, 60  # the allowance: so many, and more for each operation of the step
_RULES = 60  # those of the dispatcher, then variations of the best
_GATHERING = 0.6  # of the allowance, at most
_FIXED = 1  # what a schedule by name counts as, for each of its operations
_MOST_STARTS = 4  # orders that annealing starts from
_ROUNDS_PER_START = 3000
_TOLERANCE = 1e-9
# Of the clock, for the candidates: what follows takes about as long as the first candidate of each placement.
_SEARCHING = 0.8


def search(
    costs: StageCosts,
    devices: int,
    micro_batches: int,
    memory: Sequence[float] = (),
    placement: Sequence[int] = (),
    objective: str = "makespan",
    seed: int = 0,
    effort: float = 1.0,
    seconds: float = math.inf,
) -> Schedule:
    """Return a schedule for these costs that is at least as short as every named schedule that fits.

    Candidates are the synchronous schedules of `build` with one copy of the model that have the placement and fit the
    memory, as they are and with the backwards on their critical path split; and what the dispatcher makes under some
    rules. Simulated annealing then moves operations on the critical path of the best. It stops when the objective
    meets `bound`. The result passes `check`, and each stage runs its backwards in the order of the micro-batches: sums
    of gradients round as in training without stages.

    Args:
        costs: of the stages and links.
        devices: how many devices.
        micro_batches: how many micro-batches one step has.
        memory: bytes of stash per device; left out, no limit.
        placement: the device of each stage; left out, the linear, looped and wave placements of as many stages as the
            costs have are tried.
        objective: "makespan", or "zero-bubble" for the longest span of one device (`Timeline.zero_bubble_seconds`).
        seed: of the random moves.
        effort: how much to try, in units of about a second for 8 devices and 32 micro-batches. The result depends on
            it, on the seed and on the other arguments alone.
        seconds: a limit on the time; the best schedule found by then is returned. At least one candidate of each
            placement is made, and the result is checked.

    Raises:
        ScheduleError: a single micro-batch does not fit, no order is found that fits, or the numbers do not go
            together.

    >>> costs = StageCosts([1, 2, 1, 1], [1, 2, 1, 1], [1, 1, 1, 1], stash_bytes=[1, 1, 1, 1])
    >>> schedule = search(costs, devices=4, micro_batches=8, memory=[4, 4, 4, 4])
    >>> simulate(schedule, costs).makespan
    41.0
    """
    check_objective(objective)
    places = [tuple(placement)] if len(placement) else placements(costs.stages, devices)
    clock = Clock(seconds).part(_SEARCHING)
    searches = [
        _Search(costs, make_problem(costs, devices, micro_batches, memory, device_of), memory, objective, seed)
        for device_of in places
    ]
    for on_placement in searches:
        on_placement.gather(effort / len(searches), clock)
    searches = [on_placement for on_placement in searches if on_placement.orders or on_placement.fixed]
    if not searches:
        raise ScheduleError(f"no order that was tried keeps to a memory of {list(memory)} bytes a device")
    min(searches, key=lambda on_placement: on_placement.seconds).anneal(effort, clock)
    _, schedule = min((on_placement.best(clock) for on_placement in searches), key=itemgetter(0))
    check(schedule, costs, memory)
    return schedule


class _Search:
    """The orders found on one placement, each with its objective in seconds; owned by one call of `search`."""

    def __init__(
        self, costs: StageCosts, problem: Problem, memory: Sequence[float], objective: str, seed: int
    ) -> None:
        self.costs, self.problem, self.memory, self.objective = costs, problem, memory, objective
        self.measure = OBJECTIVES[objective]
        cheapest = make_problem(
            costs.cheapest, problem.devices, problem.micro_batches, memory, problem.device_of
        )
        # Overlapped pairs of actions can beat the bound.
        self.goal = 0.0 if costs.overlap else problem_bound(cheapest, objective)
        self.random = Random(seed)
        self.work = 0.0
        self.orders: list[tuple[float, list[Row]]] = []
        self.fixed: list[tuple[float, Schedule]] = []  # named schedules that may be quicker, or fit, as they are
        self.played: set[int] = set()  # hashes of named schedules, some of which are equal

    @property
    def seconds(self) -> float:
        """The objective of the best order so far; infinite for none."""
        return min((seconds for seconds, _ in (*self.orders, *self.fixed)), default=math.inf)

    def gather(self, effort: float, clock: Clock) -> None:
        """Play the named schedules and what the rules make, as long as the allowance lasts."""
        allowance = self._allowance(effort * _GATHERING, clock)
        for name in GENERATORS:
            if self._meets_goal or (self.seconds < math.inf and clock.is_over):
                return
            if self._add_fixed(name):
                allowance.spend(_FIXED * self.problem.operations)
        best, shortest = RULES[0], math.inf
        for number in range(_RULES):
            if self._meets_goal or (self.seconds < math.inf and allowance.is_over):
                break
            rule = RULES[number] if number < len(RULES) else best.varied(self.random, self.problem.memory is not None)
            allowance.spend(dispatching_work(self.problem))
            dispatched = dispatch(self.problem, rule)
            if dispatched is not None and self._add(dispatched.rows) and dispatched.makespan < shortest:
                best, shortest = rule, dispatched.makespan
        self.work = allowance.used

    def anneal(self, effort: float, clock: Clock) -> None:
        """Spend the rest of the allowance on local search, from the best few orders if there is enough."""
        allowance = self._allowance(effort, clock)
        allowance.spend(self.work)
        rounds = int((allowance.operations - allowance.used) / round_work(self.problem))
        turns = min(_MOST_STARTS, max(1, rounds // _ROUNDS_PER_START))
        for _, rows in sorted(self.orders, key=itemgetter(0))[:turns]:
            if rounds >= turns and not self._meets_goal:
                share = rounds // turns
                self._add(
                    anneal_order(
                        self.problem, rows, self.measure, share, self.random, self.goal, allowance
                    )
                )

    def best(self, clock: Clock) -> tuple[float, Schedule]:
        """Return the shortest schedule, and its objective in seconds.

        Of the searched orders, each I and the W right behind it become one B where that costs nothing, or gains.
        """
        count = _MOST_STARTS if self._parts_cost else 1
        split = [
            self.problem.schedule_of("search", rows)
            for _, rows in sorted(self.orders, key=itemgetter(0))[:count]
        ]
        fused = [self._timed(fuse_backward(order)) for order in split]
        fixed = sorted(self.fixed, key=itemgetter(0))
        again = [
            self._timed(split_critical(order, self.costs, self.memory))
            for _, order in (fixed + fused)[:_MOST_STARTS] + fused[:1]
            if self._parts_cost and not clock.is_over
        ]
        choices = [*fused, *fixed, *again, *map(self._timed, split[:1])]
        shortest = min(seconds for seconds, _ in choices)
        return next(choice for choice in choices if choice[0] <= shortest * (1 + _TOLERANCE))

    def _allowance(self, effort: float, clock: Clock) -> Allowance:
        return Allowance(effort * (_OPERATIONS + _OPERATIONS_EACH * self.problem.operations), clock)

    @property
    def _meets_goal(self) -> bool:
        return self.seconds <= self.goal * (1 + _TOLERANCE)

    def _timed(self, schedule: Schedule) -> tuple[float, Schedule]:
        return objective_seconds(simulate(schedule, self.costs), self.objective), schedule

    @property
    def _parts_cost(self) -> bool:
        """Whether on any stage a full backward is quicker than its parts."""
        return self.costs.cheapest is not self.costs

    def _add(self, rows: list[Row]) -> bool:
        """Keep an order if it can run and fits; return whether it does."""
        ends, done = play(self.problem.table, rows)
        fits = done and self.problem.fits(rows, ends)
        if fits:
            self.orders.append((self.measure(self.problem, rows, ends), rows))
        return fits

    def _add_fixed(self, name: str) -> bool:
        """Play a schedule that needs no costs, if it is synchronous, of one model, and on this placement.

        Its backwards are split. It is played as it is, too, if that can be quicker or need less memory. Returns whether
        the schedule is on this placement.
        """
        schedule = _placed(name, self.problem, 1) and _placed(name, self.problem, self.problem.micro_batches)
        if schedule is None or hash(schedule.actions) in self.played:
            return schedule is not None
        self.played.add(hash(schedule.actions))
        rows = self.problem.rows_of(schedule)
        if not self.problem.in_order(rows):
            return True
        fits = self._add(rows)
        overlaps = self.costs.overlap and any(action.parts for row in schedule.actions for action in row)
        if fits and not self._parts_cost and not overlaps:
            return True
        timeline = simulate(schedule, self.costs)
        if all(
            peak <= room * SLACK for peak, room in zip(timeline.peak_bytes, self.memory, strict=False)
        ):
            self.fixed.append((objective_seconds(timeline, self.objective), schedule))
        return True


def _placed(name: str, problem: Problem, micro_batches: int) -> Schedule | None:
    """Return the named schedule for ``micro_batches``; None if it does not have the problem's placement."""
    chunks = problem.stages // problem.devices
    try:
        schedule = generate(name, problem.devices, micro_batches, chunks, {})
    except ScheduleError:
        return None
    if schedule.versions or schedule.replicas > 1:
        return None
    if chunks == 1 and problem.stages == problem.devices:
        schedule = permute_devices(schedule, problem.device_of)
    return schedule if schedule.device_of == problem.device_of else None
