"""Lower bounds: seconds that no schedule can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.costs import StageCosts
from ..core.placement import placements
from .objectives import check_objective
from .problem import F, I, Problem, make_problem

_SLACK = 1 + 1e-9


def bound(
    costs: StageCosts,
    devices: int,
    micro_batches: int,
    memory: Sequence[float] = (),
    placement: Sequence[int] = (),
    objective: str = "makespan",
) -> float:
    """Return seconds that no schedule can beat.

    For each device, the bound is the largest of three: its work after the first forward can have reached it; its work
    after the first gradient can have come back, less the forwards that fit in its memory before that; and its
    micro-batches in groups of as many as fit, each taking a round trip to the last stage and back (Little's law).
    What must follow the device's last backward is added. The whole way of one micro-batch is a bound, too.

    Args:
        costs: of the stages and links.
        devices: how many devices.
        micro_batches: how many micro-batches one step has.
        memory: bytes of stash per device; left out, no limit.
        placement: the device of each stage; left out, the best of those that `search` tries.
        objective: "makespan", or "zero-bubble" for the longest span of one device (`Timeline.zero_bubble_seconds`).

    Raises:
        ScheduleError: a single micro-batch does not fit, or the numbers do not go together.

    >>> bound(StageCosts([1, 1], [1, 1], [1, 1], stash_bytes=[1, 1]), 2, 4, memory=[1, 1])
    20.0
    """
    tried = [tuple(placement)] if placement else placements(costs.stages, devices)
    problems = [make_problem(costs, devices, micro_batches, memory, device_of) for device_of in tried]
    return min(problem_bound(problem, objective) for problem in problems)


def problem_bound(problem: Problem, objective: str) -> float:
    """Return what no order of a problem's operations can beat."""
    check_objective(objective)
    from_zero = objective == "makespan"
    problem = replace(problem, costs=problem.costs.cheapest)
    trips = _Trips(problem)
    per_device = [
        max(
            _work_bound(problem, trips, device, from_zero), _turnover_bound(problem, trips, device, from_zero)
        )
        for device in range(problem.devices)
    ]
    per_stage = [_slot_bound(problem, trips, stage, from_zero) for stage in range(problem.stages)]
    return max(*per_device, *per_stage)


class _Trips:
    """The trip of one micro-batch through all stages and back, without any waiting; one number per stage.

    head: when its forward can begin.
    turn: seconds from then until its backward can begin.
    tail: seconds from the end of its I until all earlier stages are done with it.
    """

    def __init__(self, problem: Problem) -> None:
        costs, stages = problem.costs, problem.stages
        hop = [
            problem.delay[problem.operation(F, stage, 0)] for stage in range(stages)
        ]  # from the one before
        back = [
            problem.delay[problem.operation(I, stage, 0)] for stage in range(stages)
        ]  # from the one after
        self.head, self.tail = [0.0] * stages, [costs.backward_weight[0]] * stages
        for stage in range(1, stages):
            self.head[stage] = self.head[stage - 1] + costs.forward[stage - 1] + hop[stage]
            self.tail[stage] = self.tail[stage - 1] + back[stage - 1] + costs.backward_input[stage - 1]
        self.turn = [0.0] * stages
        self.turn[-1] = costs.forward[-1]
        for stage in reversed(range(stages - 1)):
            beyond = self.turn[stage + 1] + costs.backward_input[stage + 1]
            self.turn[stage] = costs.forward[stage] + hop[stage + 1] + beyond + back[stage]


def _work_bound(problem: Problem, trips: _Trips, device: int, from_zero: bool) -> float:
    """All work of a device, less what memory lets it do before its first backward, or put off past its last."""
    costs, m = problem.costs, problem.micro_batches
    stages = [stage for stage, home in enumerate(problem.device_of) if home == device]
    first, last = stages[0], stages[-1]
    work = m * sum(costs.stage_seconds[stage] for stage in stages)
    until_turn = trips.head[last] + trips.turn[last] - trips.head[first]
    before_turn = _most_seconds(problem, stages, costs.forward, costs.stash_bytes, problem.memory[device])
    finished = until_turn + work - min(before_turn, until_turn)
    if not from_zero:
        return finished
    after_last = _most_seconds(
        problem, stages, costs.backward_weight, costs.weight_stash_bytes, problem.memory[device]
    )
    return trips.head[first] + finished + max(0.0, trips.tail[first] - after_last)


def _most_seconds(
    problem: Problem, stages: Sequence[int], seconds: Sequence[float], sizes: Sequence[float], room: float
) -> float:
    """The most seconds of one kind of work whose stashes fit at once; with several stages, fractions count."""
    m = problem.micro_batches
    total = 0.0
    for stage in sorted(
        stages, key=lambda stage: sizes[stage] / seconds[stage] if seconds[stage] else float("inf")
    ):
        fitting = min(m, room * _SLACK / sizes[stage]) if sizes[stage] else m
        total += seconds[stage] * (fitting if len(stages) > 1 else int(fitting))
        room -= fitting * sizes[stage]
        if room <= 0:
            break
    return total


def _slot_bound(problem: Problem, trips: _Trips, stage: int, from_zero: bool) -> float:
    """The micro-batches of a stage in groups of as many as fit, one group after the other."""
    costs, m = problem.costs, problem.micro_batches
    size = costs.stash_bytes[stage]
    slots = int(min(m, problem.memory[problem.device_of[stage]] * _SLACK / size)) if size else m
    round_trip = trips.turn[stage] + costs.backward_input[stage]
    groups, rest = divmod(m - 1, slots)
    released_late = costs.weight_stash_bytes[stage] >= size
    begun = groups * (round_trip + costs.backward_weight[stage] * released_late) + rest * costs.forward[stage]
    if not from_zero:
        return begun + round_trip + costs.backward_weight[stage]
    return trips.head[stage] + begun + round_trip + max(trips.tail[stage], costs.backward_weight[stage])


def _turnover_bound(problem: Problem, trips: _Trips, device: int, from_zero: bool) -> float:
    """Bytes times the seconds for which each is kept, over the bytes that the device has."""
    costs = problem.costs
    stages = [stage for stage, home in enumerate(problem.device_of) if home == device]
    byte_seconds = sum(
        costs.stash_bytes[stage] * (trips.turn[stage] + costs.backward_input[stage])
        + costs.weight_stash_bytes[stage] * costs.backward_weight[stage]
        for stage in stages
    )
    if not byte_seconds:  # the device may have no memory for stashes at all
        return 0.0
    head = trips.head[stages[0]] if from_zero else 0.0
    return head + problem.micro_batches * byte_seconds / (problem.memory[device] * _SLACK)
