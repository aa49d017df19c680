"""Searches for a short schedule of stages with unequal costs."""

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
from ..simulation.simulate import simulate
from ..transforms.passes import fuse_backward, permute_devices
from .allowance import Allowance
from .bounds import problem_bound
from .clock import Clock
from .dispatching import RULES, dispatch, dispatching_work
from .local_search import anneal_order, round_work
from .objectives import OBJECTIVES, check_objective, objective_seconds
from .playing import fits, play
from .problem import SLACK, Problem, Row, make_problem

# Allowance of a search with effort 1: a constant, and more for each operation of the step.
_BASE_OPERATIONS, _OPERATIONS_PER_OPERATION = 1_000_000, 60
_RULES = 60  # rules to dispatch under: the listed rules, then variations of the best
_CANDIDATE_SHARE = 0.6  # largest share of the allowance for the candidates; annealing has the rest
_NAMED_WORK = 1  # work of simulating a named schedule, per operation
_MOST_STARTS = 4  # orders to start annealing from
_ROUNDS_PER_START = 1500
_TOLERANCE = 1e-9
# Share of the clock for the search. Finishing the result takes about as long as the first candidate of each placement.
_SEARCH_SHARE = 0.8


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
    """Search for a short schedule; the result is never longer than any named schedule that fits.

    The candidates are the named synchronous schedules with one copy of the model that have the placement and fit the
    memory, and the orders of the dispatcher under several rules. Simulated annealing then moves operations on the
    critical path of the best candidate, until the objective reaches `bound`. The result passes `check`. Each stage runs
    its backwards in the order of the micro-batches, so sums of gradients round as in training without stages.

    Args:
        costs: of the stages and links.
        devices: number of devices.
        micro_batches: number of micro-batches of a step.
        memory: limit of stash bytes per device; empty for no limit.
        placement: the device of each stage; if empty, try the linear, looped and wave placements of the stages.
        objective: "makespan", or "zero-bubble" for the longest span of one device (`Timeline.zero_bubble_seconds`).
        seed: of the random moves.
        effort: amount of work; 1 is about a second for 8 devices and 32 micro-batches. Equal arguments give equal
            results.
        seconds: time limit, after which the best schedule so far is returned. At least one candidate is always tried.

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
    clock = Clock(seconds).part(_SEARCH_SHARE)
    searches = [
        _Search(
            costs, make_problem(costs, devices, micro_batches, memory, device_of), memory, objective, seed
        )
        for device_of in places
    ]
    for number, placed in enumerate(searches):
        if any(earlier.seconds < math.inf for earlier in searches[:number]) and clock.is_over:
            break
        placed.gather(effort / len(searches), clock)
    searches = [placed for placed in searches if placed.orders or placed.named]
    if not searches:
        raise ScheduleError(f"no order that was tried keeps to a memory of {list(memory)} bytes a device")
    min(searches, key=lambda placed: placed.seconds).anneal(effort, clock)
    if clock.is_over:  # to join full backwards takes time again
        searches = [min(searches, key=lambda placed: placed.seconds)]
    return min((placed.best(clock) for placed in searches), key=itemgetter(0))[1]


class _Search:
    """The candidates on one placement, each with its objective in seconds. Belongs to one call of `search`."""

    def __init__(
        self, costs: StageCosts, problem: Problem, memory: Sequence[float], objective: str, seed: int
    ) -> None:
        self.costs, self.problem, self.memory, self.objective = costs, problem, memory, objective
        self.measure = OBJECTIVES[objective]
        cheapest = make_problem(
            costs.cheapest, problem.devices, problem.micro_batches, memory, problem.device_of
        )
        self.goal = problem_bound(cheapest, objective)
        self.random = Random(seed)
        self.work = 0.0
        self.orders: list[tuple[float, list[Row]]] = []
        self.named: list[tuple[float, Schedule]] = []  # with whole backwards

    @property
    def seconds(self) -> float:
        """The objective of the best candidate so far, in seconds; infinite if there is none."""
        return min((seconds for seconds, _ in (*self.orders, *self.named)), default=math.inf)

    def gather(self, effort: float, clock: Clock) -> None:
        """Simulate the named schedules, then dispatch under the rules while the allowance lasts."""
        allowance = self._allowance(effort * _CANDIDATE_SHARE, clock)
        for name in GENERATORS:
            if self._meets_goal or (self.seconds < math.inf and clock.is_over):
                return
            if self._add_named(name):
                allowance.spend(_NAMED_WORK * self.problem.operations)
        best, shortest = RULES[0], math.inf
        for number in range(_RULES):
            if self._meets_goal or (self.seconds < math.inf and allowance.is_over):
                break
            limited = self.problem.memory is not None
            rule = RULES[number] if number < len(RULES) else best.varied(self.random, limited)
            allowance.spend(dispatching_work(self.problem))
            dispatched = dispatch(self.problem, rule)
            if dispatched is not None and self._add(dispatched.rows) and dispatched.makespan < shortest:
                best, shortest = rule, dispatched.makespan
        self.work = allowance.used

    def anneal(self, effort: float, clock: Clock) -> None:
        """Spend the rest of the allowance on annealing, from up to four of the best orders."""
        allowance = self._allowance(effort, clock)
        allowance.spend(self.work)
        rounds = int((allowance.operations - allowance.used) / round_work(self.problem))
        turns = min(_MOST_STARTS, max(1, rounds // _ROUNDS_PER_START))
        for _, rows in sorted(self.orders, key=itemgetter(0))[:turns]:
            if rounds >= turns and not self._meets_goal:
                share = rounds // turns
                self._add(
                    anneal_order(self.problem, rows, self.measure, share, self.random, self.goal, allowance)
                )

    def best(self, clock: Clock) -> tuple[float, Schedule]:
        """Return the objective in seconds of the shortest schedule, and the schedule.

        If there is time, an I followed by its W becomes one B.
        """
        few = sorted(self.orders, key=itemgetter(0))[: _MOST_STARTS if self._parts_cost else 1]
        split = [(seconds, self.problem.schedule_of("search", rows)) for seconds, rows in few]
        choices = [*sorted(self.named, key=itemgetter(0)), *split]
        if not clock.is_over:
            choices = [*(self._timed(fuse_backward(order)) for _, order in split), *choices]
        shortest = min(seconds for seconds, _ in choices)
        return next(choice for choice in choices if choice[0] <= shortest * (1 + _TOLERANCE))

    def _allowance(self, effort: float, clock: Clock) -> Allowance:
        return Allowance(
            effort * (_BASE_OPERATIONS + _OPERATIONS_PER_OPERATION * self.problem.operations), clock
        )

    @property
    def _meets_goal(self) -> bool:
        return self.seconds <= self.goal * (1 + _TOLERANCE)

    def _timed(self, schedule: Schedule) -> tuple[float, Schedule]:
        return objective_seconds(simulate(schedule, self.costs), self.objective), schedule

    @property
    def _parts_cost(self) -> bool:
        """True if B is faster than I and W together on any stage."""
        return self.costs.cheapest is not self.costs

    def _add(self, rows: list[Row]) -> bool:
        """Add an order to the candidates and return True if it has no deadlock and fits the memory."""
        ends = play(self.problem, rows)
        if ends is None or not fits(self.problem, rows, ends):
            return False
        self.orders.append((self.measure(self.problem, rows, ends), rows))
        return True

    def _add_named(self, name: str) -> bool:
        """Simulate a named schedule with split backwards, and unchanged if that may be faster or need less memory.

        Returns True if the schedule is synchronous, has one copy of the model, and has this placement.
        """
        schedule = _placed(name, self.problem, 1) and _placed(name, self.problem, self.problem.micro_batches)
        if schedule is None:
            return False
        rows = self.problem.rows_of(schedule)
        if not self.problem.in_order(rows):
            return True
        if self._add(rows) and not self._parts_cost:
            return True
        timeline = simulate(schedule, self.costs)
        if all(peak <= room * SLACK for peak, room in zip(timeline.peak_bytes, self.memory, strict=False)):
            self.named.append((objective_seconds(timeline, self.objective), schedule))
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
