"""List scheduling: whenever a device is free, a rule decides what it runs next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .problem import F, I, Problem, Row, W

_EPSILON = 1e-9


@dataclass(frozen=True)
class Rule:
    """How a device decides.

    in_flight: most micro-batches between forward and backward on each stage, as a multiple of what a round
        trip to the last stage and back takes at the pace of the bottleneck; infinite for as many as fit.
    backward_first: whether I goes before F when both are there.
    weight_gap: W runs while the device waits, if the wait lasts at least this part of it.
    patience: F is put off when an I is known to arrive within this part of it.
    """

    in_flight: float
    backward_first: bool
    weight_gap: float
    patience: float


def rules() -> Iterator[Rule]:
    """Every combination worth a try, the most promising first."""
    for weight_gap, patience, in_flight, backward_first in product(
        (0.0, 0.5, 1.0), (0.0, 0.5), (float("inf"), 1.0, 1.3), (True, False)
    ):
        yield Rule(in_flight, backward_first, weight_gap, patience)


def list_schedule(problem: Problem, rule: Rule) -> list[Row]:
    """Return the rows of operations that the rule makes.

    A forward begins when its stash fits and, beside it, that of the device's later stages for one micro-batch.
    So the oldest micro-batch can always go on: there is no deadlock, whatever the placement.
    """
    return _Clockwork(problem, rule).run()


class _Clockwork:
    """The state of all devices at one moment; owned by one call of `list_schedule`."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        costs, stages = problem.costs, problem.stages
        self.stages_on: list[list[int]] = [[] for _ in range(problem.devices)]
        for stage, device in enumerate(problem.device_of):
            self.stages_on[device].append(stage)
        self.seconds = (costs.forward, costs.backward_input, costs.backward_weight)
        self.done = [[0] * stages for _ in range(3)]  # how many of each kind have begun on each stage
        self.needs = [
            0.0
        ] * stages  # bytes that must be free for a forward: this stage and the device's later ones
        for on in self.stages_on:
            for at, stage in enumerate(on):
                self.needs[stage] = sum(costs.stash_bytes[later] for later in on[at:])
        self.used = [0.0] * problem.devices
        self.arrivals: list[list[list[float]]] = [[[] for _ in range(stages)] for _ in range(2)]
        self.arrivals[F][0] = [0.0] * problem.micro_batches
        self.free = [0.0] * problem.devices
        self.most = [_in_flight_limit(problem, stage, rule.in_flight) for stage in range(stages)]
        self.rows: list[Row] = [[] for _ in range(problem.devices)]
        self.events: list[tuple[float, int]] = [(0.0, device) for device in range(problem.devices)]

    def run(self) -> list[Row]:
        """Let every device act at each moment when it is free or something arrives, until all is done."""
        events = self.events
        while events:
            now, device = heapq.heappop(events)
            while events and events[0] == (now, device):
                heapq.heappop(events)
            if self.free[device] <= now + _EPSILON:
                self._decide(device, now)
        return self.rows

    def _decide(self, device: int, now: float) -> None:
        """Begin the next operation of a free device, or leave it waiting."""
        here = now + _EPSILON
        backward, backward_stage = self._next_backward(device)
        forward, forward_stage = self._next_forward(device, here)
        blocked = forward_stage >= 0 and forward <= here and not self._has_room(device, forward_stage)
        wanted = forward <= here and not blocked
        patient = here < backward < now + self.rule.patience * self.seconds[F][forward_stage]
        if backward <= here and (self.rule.backward_first or not wanted):
            self._begin(I, backward_stage, now)
        elif wanted and not patient:
            self._begin(F, forward_stage, now)
        elif (weight_stage := self._pending_weight(device)) >= 0:
            wait = min(backward, float("inf") if blocked else forward) - now
            if blocked or wait >= self.rule.weight_gap * self.seconds[W][weight_stage]:
                self._begin(W, weight_stage, now)

    def _next_backward(self, device: int) -> tuple[float, int]:
        """When the next I can begin and on which stage: the first to arrive."""
        if len(self.stages_on[device]) == 1:
            stage = self.stages_on[device][0]
            return self._arrival(I, stage), stage
        return min((self._arrival(I, stage), stage) for stage in self.stages_on[device])

    def _next_forward(self, device: int, here: float) -> tuple[float, int]:
        """When the next F can begin and on which stage: of those that are there, the furthest along."""
        best = (float("inf"), -1)
        for stage in reversed(self.stages_on[device]):
            arrival = self._arrival(F, stage)
            if arrival < best[0] and self.done[F][stage] - self.done[I][stage] < self.most[stage]:
                best = (arrival, stage)
            if best[0] <= here:
                break
        return best

    def _has_room(self, device: int, stage: int) -> bool:
        return self.used[device] + self.needs[stage] <= self.problem.memory[device] * (1 + _EPSILON)

    def _pending_weight(self, device: int) -> int:
        """The stage whose W has been put off longest; -1 for none."""
        begun, done = self.done[I], self.done[W]
        best = -1
        for stage in self.stages_on[device]:
            if done[stage] < begun[stage] and (best < 0 or done[stage] < done[best]):
                best = stage
        return best

    def _arrival(self, kind: int, stage: int) -> float:
        """When the input of the next operation of a kind is there; infinite as long as nobody knows."""
        arrivals = self.arrivals[kind][stage]
        k = self.done[kind][stage]
        return arrivals[k] if k < len(arrivals) else float("inf")

    def _begin(self, kind: int, stage: int, now: float) -> None:
        problem = self.problem
        device = problem.device_of[stage]
        k = self.done[kind][stage]
        self.done[kind][stage] += 1
        operation = problem.operation(kind, stage, k)
        self.rows[device].append(operation)
        end = now + self.seconds[kind][stage]
        self.free[device] = end
        heapq.heappush(self.events, (end, device))
        self.used[device] += problem.taken[operation]
        if kind != W:
            self._send(kind, stage, k, end, now)

    def _send(self, kind: int, stage: int, k: int, end: float, now: float) -> None:
        """Let the next device know at once when the result will be there."""
        problem = self.problem
        target = stage + 1 if kind == F else stage - 1
        if kind == F and target == problem.stages:
            kind, target = I, stage
        if target < 0:
            return
        delay = problem.delay[problem.operation(kind, target, k)] if target != stage else 0.0
        self.arrivals[kind][target].append(end + delay)
        device = problem.device_of[target]
        if self.free[device] < end + delay:
            heapq.heappush(self.events, (end + delay, device))
        if self.free[device] <= now:
            heapq.heappush(self.events, (now, device))


def _in_flight_limit(problem: Problem, stage: int, factor: float) -> float:
    """How many micro-batches the rule lets be in flight on a stage."""
    if factor == float("inf"):
        return factor
    costs, m = problem.costs, problem.micro_batches
    later = range(stage + 1, problem.stages)
    trip = costs.backward_input[stage] + costs.forward[stage]
    trip += sum(costs.forward[s] + costs.backward_input[s] for s in later)
    trip += sum(problem.delay[problem.operation(F, s, 0)] for s in later)
    trip += sum(problem.delay[problem.operation(I, s - 1, 0)] for s in later)
    work = [0.0] * problem.devices
    for device, seconds in zip(problem.device_of, costs.stage_seconds, strict=True):
        work[device] += seconds
    return min(m, max(1, -(-factor * trip // max(work)))) if max(work) else m
