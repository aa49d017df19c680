"""Searches a schedule for unequal stages, from their costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
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
from .bounds import problem_bound
from .dispatching import dispatch, steady_keys, work_of
from .local_search import improve
from .objectives import OBJECTIVES, check_objective, objective_seconds
from .problem import Problem, Row, make_problem
from .split_critical import split_critical
from .zero_bubble_heuristic import automatic_zero_bubble, switches

_EFFORT = 6_000_000  # operations played; about a second
_EFFORT_PER_OPERATION = 120
_GATHERING = 0.6  # of the allowance
_MAKING = 12  # seconds to make an order by a rule, relative to playing it once
_MOVING = 150  # seconds of a move of local search, relative to playing one operation
_MOST_STARTS = 4  # orders that local search starts from
_PLAYS_PER_START = 3000
_TOLERANCE = 1e-9
# How operations are ranked, the most promising first; see `steady_keys` and `dispatch`.
_RULES = list(product((2.0, 0.6, -0.5), (2.0, 0.6, -0.5), (0.0, 0.5, 1.0)))


def search(
    costs: StageCosts,
    devices: int,
    micro_batches: int,
    memory: Sequence[float] = (),
    placement: Sequence[int] = (),
    objective: str = "makespan",
    seed: int = 0,
    effort: float = 1.0,
    seconds: float = float("inf"),
) -> Schedule:
    """Return a schedule for these costs that is at least as short as every named schedule that fits.

    Candidates are the synchronous schedules of `build` with one copy of the model that have the placement and fit the
    memory, as they are and with the backwards on their critical path split; the heuristic of the zero-bubble paper
    (stages on a line); and list scheduling under some dozens of rules. Simulated annealing then moves operations on
    the critical path of the best. It stops when the objective meets `bound`. The result passes `check`, and each stage
    runs its backwards in the order of the micro-batches: sums of gradients round as in training without stages.

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
        seconds: a limit on the time; the best schedule found by then is returned.

    Raises:
        ScheduleError: a single micro-batch does not fit, no order is found that fits, or the numbers do not go
            together.

    >>> costs = StageCosts([1, 2, 1, 1], [1, 2, 1, 1], [1, 1, 1, 1], stash_bytes=[1, 1, 1, 1])
    >>> found = search(costs, devices=4, micro_batches=8, memory=[4, 4, 4, 4])
    >>> simulate(found, costs).makespan
    41.0
    """
    check_objective(objective)
    tried = [tuple(placement)] if len(placement) else placements(costs.stages, devices)
    deadline = time.monotonic() + seconds
    searches = [
        _Search(
            make_problem(costs, devices, micro_batches, memory, device_of),
            objective,
            seed,
            deadline,
        )
        for device_of in tried
    ]
    for one in searches:
        one.gather(effort / len(searches))
    searches = [one for one in searches if one.found or one.whole]
    if not searches:
        raise ScheduleError(f"no order that was tried keeps to a memory of {list(memory)} bytes a device")
    min(searches, key=lambda one: one.value).improve(effort)
    _, schedule = min((one.best() for one in searches), key=itemgetter(0))
    check(schedule, costs, memory)
    return schedule


class _Search:
    """The best order found so far on one placement; owned by one call of `search`."""

    def __init__(self, problem: Problem, objective: str, seed: int, deadline: float) -> None:
        self.problem, self.objective = problem, objective
        self.measure = OBJECTIVES[objective]
        self.goal = problem_bound(problem, objective)
        self.random = Random(seed)
        self.deadline = deadline
        self.work = 0.0
        self.found: list[tuple[float, list[Row]]] = []
        self.played: set[int] = set()  # hashes of the fixed schedules, some of which are equal
        self.whole: list[
            tuple[float, Schedule]
        ] = []  # fixed schedules that may be quicker, or fit, as they are

    @property
    def value(self) -> float:
        """What the best order so far takes."""
        return min(seconds for seconds, _ in (*self.found, *self.whole))

    def gather(self, effort: float) -> None:
        """Play every fixed schedule, and then what the rules make, as long as the allowance lasts."""
        limit = effort * self._allowance()
        for name in GENERATORS:
            self._add_fixed(name)
        for make in self._by_rules():
            if (self.found or self.whole) and self._is_done(limit * _GATHERING):
                return
            self.work += _MAKING * self.problem.operations
            with suppress(ScheduleError):
                self._add(make())

    def improve(self, effort: float) -> None:
        """Spend the rest of the allowance on local search, from the best few orders if there is enough."""
        limit = effort * self._allowance()
        work_per_play = self.problem.operations + _MOVING
        plays = (limit - self.work) / work_per_play
        turns = min(_MOST_STARTS, max(1, int(plays / _PLAYS_PER_START)))
        for _, rows in sorted(self.found, key=itemgetter(0))[:turns]:
            share = int(plays / turns)
            if share < 1 or self._is_done(limit):
                return
            self._add(improve(self.problem, rows, self.measure, share, self.random, self.goal, self.deadline))
            self.work += share * work_per_play

    def best(self) -> tuple[float, Schedule]:
        """Return the shortest schedule, and what it takes.

        Of the searched orders, each I and the W right behind it become one B where that costs nothing, or gains.
        """
        ranked = [rows for _, rows in sorted(self.found, key=itemgetter(0))]
        split = [self.problem.schedule_of("search", rows) for rows in ranked[:_MOST_STARTS]]
        fused = [self._timed(fuse_backward(order)) for order in split[: None if self._parts_cost else 1]]
        whole = sorted(self.whole, key=itemgetter(0))
        again = [
            self._timed(split_critical(order, self.problem.costs, self.problem.memory))
            for _, order in (whole + fused)[:_MOST_STARTS] + fused[:1]
            if self._parts_cost
        ]
        choices = [*fused, *whole, *again, *map(self._timed, split[:1])]
        least = min(seconds for seconds, _ in choices)
        return next(choice for choice in choices if choice[0] <= least * (1 + _TOLERANCE))

    def _timed(self, schedule: Schedule) -> tuple[float, Schedule]:
        return objective_seconds(simulate(schedule, self.problem.costs), self.objective), schedule

    @property
    def _parts_cost(self) -> bool:
        """Whether on any stage a full backward is quicker than its parts."""
        return self.problem.costs.cheapest is not self.problem.costs

    def _allowance(self) -> float:
        return _EFFORT + _EFFORT_PER_OPERATION * self.problem.operations

    def _add(self, rows: list[Row]) -> bool:
        """Keep an order if it can run and fits; return whether it does."""
        ends, done = play(self.problem.table, rows)
        self.work += self.problem.operations
        fits = done and self.problem.fits(rows)
        if fits:
            self.found.append((self.measure(self.problem, rows, ends), rows))
        return fits

    def _add_fixed(self, name: str) -> None:
        """Play a schedule that needs no costs, if it is synchronous, of one model, and on this placement.

        Its backwards are split. It is played as it is, too, if that can be quicker or need less memory.
        """
        schedule = _placed(name, self.problem, 1) and _placed(name, self.problem, self.problem.micro_batches)
        if schedule is None or hash(schedule.actions) in self.played:
            return
        self.played.add(hash(schedule.actions))
        rows = self.problem.rows_of(schedule)
        if not self.problem.in_order(rows):
            return
        fits = self._add(rows)
        overlaps = self.problem.costs.overlap and any(
            action.parts for row in schedule.actions for action in row
        )
        if fits and not self._parts_cost and not overlaps:
            return
        timeline = simulate(schedule, self.problem.costs)
        peaks = zip(timeline.peak_bytes, self.problem.memory, strict=True)
        if all(peak <= room * (1 + _TOLERANCE) for peak, room in peaks):
            self.whole.append((objective_seconds(timeline, self.objective), schedule))

    def _by_rules(self) -> Iterator[Callable[[], list[Row]]]:
        """What makes an order from the costs; the first works in any memory."""
        first, *others = _RULES
        yield partial(_dispatched, self.problem, *first)
        if self.problem.stages == self.problem.devices:
            for choice in switches():
                yield partial(automatic_zero_bubble, self.problem, choice)
        for rule in others:
            yield partial(_dispatched, self.problem, *rule)

    def _is_done(self, limit: float) -> bool:
        met = self.value <= self.goal * (1 + _TOLERANCE)
        return met or self.work >= limit or time.monotonic() >= self.deadline


def _dispatched(problem: Problem, spread: float, spread_back: float, weight_gap: float) -> list[Row]:
    """The rows that dispatching by one rule makes.

    Raises ScheduleError when the memory is not enough.
    """
    work = work_of(problem)
    found = dispatch(work, steady_keys(work, spread, spread_back), weight_gap)
    if found is None:
        raise ScheduleError("the memory is not enough for this rule")
    return found.rows


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
