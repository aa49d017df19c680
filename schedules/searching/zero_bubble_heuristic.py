"""The heuristic scheduler of the zero-bubble paper, for one stage per device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..core.action import ScheduleError
from .problem import F, I, Problem, Row, W

_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Switches:
    """The choices that the heuristic leaves open; the paper tries them all.

    delay_first_backward: warm up with one more F although it delays the first I.
    skip_forwards: leave out an F where it would hold up the next stage no less than doing it.
    eager_weights: fill a wait that is shorter than a W with one even if no other stage has a larger bubble.
    """

    delay_first_backward: bool
    skip_forwards: bool
    eager_weights: bool


def switches() -> Iterator[Switches]:
    """Every combination."""
    for choice in product((True, False), repeat=3):
        yield Switches(*choice)


def automatic_zero_bubble(problem: Problem, choice: Switches) -> list[Row]:
    """Return the rows of operations that the heuristic makes for stages 0, 1, 2, ... on a line.

    Warm up with as many F as memory allows; then F and I in turn, W where a stage would wait longer than it
    takes, or would else get the largest bubble of all, or memory is full; the rest of W at the end.

    Raises ScheduleError where memory leaves it no way on.

    Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, §3.1.
    """
    making = _Making(problem, choice)
    making.warm_up()
    for _ in range(1, problem.micro_batches):
        making.forwards()
        making.backwards()
    making.rest_of_weights()
    return making.rows


class _Making:
    """The schedule so far; owned by one call of `automatic_zero_bubble`."""

    def __init__(self, problem: Problem, choice: Switches) -> None:
        self.problem, self.choice = problem, choice
        self.stages, self.m = problem.stages, problem.micro_batches
        costs = problem.costs
        self.seconds = (costs.forward, costs.backward_input, costs.backward_weight)
        self.stash = costs.stash_bytes
        self.room = [problem.memory[device] * _SLACK for device in problem.device_of]
        self.count = [[0] * self.stages for _ in range(3)]
        self.ends: list[list[list[float]]] = [[[] for _ in range(self.stages)] for _ in range(3)]
        self.clock = [0.0] * self.stages
        self.used = [0.0] * self.stages
        self.bubble = [0.0] * self.stages
        self.stage_rows: list[Row] = [[] for _ in range(self.stages)]

    @property
    def rows(self) -> list[Row]:
        """The operations by device."""
        rows: list[Row] = [[] for _ in range(self.stages)]
        for stage, row in enumerate(self.stage_rows):
            rows[self.problem.device_of[stage]] = row
        return rows

    def warm_up(self) -> None:
        """Run F of micro-batch 0 on every stage, more F while memory and time allow, then I of micro-batch 0."""
        for stage in range(self.stages):
            self._put(F, stage)
        extra = self._extra_forwards()
        for stage in range(self.stages):
            for _ in range(extra[stage]):
                self._put(F, stage)
        for stage in reversed(range(self.stages)):
            self._put(I, stage)

    def forwards(self) -> None:
        """Run one more F on each stage that gains by it, after the W that fit into its wait."""
        required = [self._wants_forward(stage) for stage in range(self.stages)]
        for stage in reversed(range(self.stages - 1)):
            required[stage] = required[stage] and required[stage + 1]
        for stage in range(self.stages):
            if not required[stage]:
                continue
            while self.used[stage] + self.stash[stage] > self.room[stage]:
                if not self._has_weight(stage):
                    raise ScheduleError(f"the heuristic finds no room for a forward on stage {stage}")
                self._put(W, stage)
            if stage > 0:
                self._fill_wait(stage, self._arrival(F, stage))
            self._put(F, stage)

    def backwards(self) -> None:
        """Run one more I on each stage, the last stage first, after the W that fit into its wait."""
        for stage in reversed(range(self.stages)):
            if stage + 1 < self.stages:
                self._fill_wait(stage, self._arrival(I, stage))
            if stage == 0 and self.count[F][0] == self.m:
                while self.count[W][0] < self.count[I][0]:
                    self._put(W, 0)
            self._put(I, stage)

    def rest_of_weights(self) -> None:
        """Run all W that have not run yet."""
        for stage in range(self.stages):
            while self.count[W][stage] < self.m:
                self._put(W, stage)

    def _extra_forwards(self) -> list[int]:
        """Return, per stage, how many F beyond the first run before the first I: as many as fit without delaying it."""
        extra = [0] * self.stages
        last = self.stages - 1
        done = self.ends[F][last][0] + self.seconds[I][last]
        for stage in reversed(range(last)):
            used, clock = self.used[stage], self.clock[stage]
            arrival = done + self._delay(I, stage)
            length = self.seconds[F][stage]
            while (
                self.count[F][stage] + extra[stage] < self.m and used + self.stash[stage] <= self.room[stage]
            ):
                if (clock + length > arrival) if self.choice.delay_first_backward else (clock >= arrival):
                    break
                used, clock = used + self.stash[stage], clock + length
                extra[stage] += 1
            done = max(clock, arrival) + self.seconds[I][stage]
        for stage in range(1, self.stages):
            extra[stage] = min(extra[stage], extra[stage - 1])
            if extra[stage] == extra[stage - 1] and 1 + extra[stage] < self.m:
                extra[stage] = max(0, extra[stage] - 1)
        return extra

    def _wants_forward(self, stage: int) -> bool:
        """Return True to run F in this round. A stage that is two F ahead of the next stage may skip it."""
        if self.count[F][stage] >= self.m:
            return False
        following = stage + 1
        if (
            not self.choice.skip_forwards
            or following == self.stages
            or self.count[F][stage] < self.count[F][following] + 2
        ):
            return True
        next_free = self.clock[following] + self.seconds[F][following] + self.seconds[I][following]
        next_free += self._delay(I, stage)
        if self.clock[stage] >= next_free:
            return False
        weights = self._weights_to_make_room(stage) * self.seconds[W][stage]
        if self.clock[stage] + self.seconds[F][stage] + weights <= next_free:
            return True
        return next_free - self.clock[stage] > max(self.bubble) - self.bubble[stage]

    def _weights_to_make_room(self, stage: int) -> int:
        freed = self.problem.costs.weight_stash_bytes[stage]
        pending = self.count[I][stage] - self.count[W][stage]
        over = self.used[stage] + self.stash[stage] - self.room[stage]
        return min(pending, int(-(-over // freed))) if freed and over > 0 else 0

    def _fill_wait(self, stage: int, arrival: float) -> None:
        """Run the W that end before the arrival, and one more if the rest of the wait would be the largest bubble."""
        while self._has_weight(stage) and self.clock[stage] + self.seconds[W][stage] <= arrival:
            self._put(W, stage)
        wait = arrival - self.clock[stage]
        if wait > 0 and self._has_weight(stage):
            largest = wait > max(self.bubble) - self.bubble[stage]
            if largest or self.choice.eager_weights:
                self._put(W, stage)

    def _has_weight(self, stage: int) -> bool:
        return self.count[W][stage] < self.count[I][stage]

    def _arrival(self, kind: int, stage: int) -> float:
        """Return when the input of the next F or I arrives."""
        source = stage - 1 if kind == F else stage + 1
        if not 0 <= source < self.stages:
            return 0.0
        made, k = self.ends[kind][source], self.count[kind][stage]
        if k >= len(made):
            raise ScheduleError(f"the heuristic runs ahead of stage {source} on stage {stage}")
        return made[k] + self._delay(kind, stage)

    def _delay(self, kind: int, stage: int) -> float:
        return self.problem.delay[self.problem.operation(kind, stage, 0)]

    def _put(self, kind: int, stage: int) -> None:
        k = self.count[kind][stage]
        begin = self.clock[stage]
        if kind != W:
            begin = max(begin, self._arrival(kind, stage))
        if self.count[F][stage]:
            self.bubble[stage] += begin - self.clock[stage]
        operation = self.problem.operation(kind, stage, k)
        self.clock[stage] = begin + self.seconds[kind][stage]
        self.ends[kind][stage].append(self.clock[stage])
        self.used[stage] += self.problem.taken[operation]
        self.count[kind][stage] += 1
        self.stage_rows[stage].append(operation)
