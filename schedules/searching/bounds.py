"""Lower bounds of a step in seconds, from the round trip of one micro-batch and the work of each device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..core.costs import StageCosts
from ..core.placement import placements
from .objectives import check_objective
from .problem import SLACK, Floats, Problem, make_problem


def bound(
    costs: StageCosts,
    devices: int,
    micro_batches: int,
    memory: Sequence[float] = (),
    placement: Sequence[int] = (),
    objective: str = "makespan",
) -> float:
    """Return a lower bound in seconds for schedules without overlapped pairs of actions.

    It is the largest of these bounds over all devices and stages:

    - the work of a device, from the earliest start of its first forward. Before the first gradient can return, it runs
      only the forwards that fit its memory. After its last I, the stages before it still have to run their backwards;
    - the micro-batches of a stage in groups as large as fit its memory, each group taking a round trip to the last
      stage and back. One group of one micro-batch gives the round trip itself;
    - the byte-seconds of all stashes of a device over its memory (Little's law).

    Args:
        costs: of the stages and links.
        devices: number of devices.
        micro_batches: number of micro-batches of a step.
        memory: limit of stash bytes per device; empty for no limit.
        placement: the device of each stage; if empty, return the smallest bound of the placements that `search` tries.
        objective: "makespan", or "zero-bubble" for the longest span of one device (`Timeline.zero_bubble_seconds`).

    Raises:
        ScheduleError: a single micro-batch does not fit, or the numbers do not go together.

    >>> bound(StageCosts([1, 1], [1, 1], [1, 1], stash_bytes=[1, 1]), 2, 4, memory=[1, 1])
    20.0
    """
    check_objective(objective)
    places = [tuple(placement)] if len(placement) else placements(costs.stages, devices)
    problems = [
        make_problem(costs.cheapest, devices, micro_batches, memory, device_of) for device_of in places
    ]
    return min(problem_bound(problem, objective) for problem in problems)


def problem_bound(problem: Problem, objective: str = "makespan") -> float:
    """Return a lower bound in seconds for every order of the operations; the costs must be `StageCosts.cheapest`."""
    from_zero = objective == "makespan"
    trip = trip_of(problem)
    bounds = [work_bound(problem, trip, from_zero)]
    bounds += [_slots_bound(problem, trip, stage, from_zero) for stage in range(problem.stages)]
    if problem.memory is not None:
        bounds += [_turnover_bound(problem, trip, device, from_zero) for device in range(problem.devices)]
    return max(bounds)


class Trip:
    """Round trip of one micro-batch through all stages (or layers) and back, without waiting.

    ::

        F of stages before │ F of the stage and those behind, their I │ I, W │ I of stages before, W of the first
        ───── head ───────▶│───────────────── turn ──────────────────▶│      │──────────── tail ────────────────▶

    Args:
        forward, backward_input, backward_weight: [stages]: seconds of F, I and W.
        hops, hops_back: [stages]: transfer seconds of the input of each F and of each I; empty for zeros.

    Attributes:
        head: [stages]: seconds before the F can begin.
        turn: [stages]: seconds from the start of the F to the earliest start of the I.
        tail: [stages]: seconds from the end of the I until all earlier stages have run their I and W.
    """

    def __init__(
        self,
        forward: Floats,
        backward_input: Floats,
        backward_weight: Floats,
        hops: Floats = (),
        hops_back: Floats = (),
    ) -> None:
        stages = len(forward)
        zeros = [0.0] * stages
        hops, hops_back = hops or zeros, hops_back or zeros
        self.head, self.tail = [0.0] * stages, [0.0] * stages
        onward, back = [0.0] * stages, [0.0] * stages  # from each stage to the last, and back
        for stage in range(1, stages):
            before = stage - 1
            self.head[stage] = self.head[before] + forward[before] + hops[stage]
            after = backward_input[before] + max(self.tail[before], backward_weight[before])
            self.tail[stage] = hops_back[before] + after
        for stage in reversed(range(1, stages)):
            before = stage - 1
            onward[before] = hops[stage] + forward[stage] + onward[stage]
            back[before] = back[stage] + backward_input[stage] + hops_back[before]
        self.turn = list(map(sum, zip(forward, onward, back, strict=True)))


def trip_of(problem: Problem) -> Trip:
    """Return the round trip of the smallest micro-batch through the stages of a problem, without recomputes."""
    smallest = min(problem.scale, default=1.0)
    parts = problem.forward, problem.backward_input, problem.backward_weight
    forward, inputs, weights = ([seconds * smallest for seconds in part] for part in parts)
    return Trip(forward, inputs, weights, problem.delay_forward, problem.delay_backward)


def end_of_work(head: float, work: float, turn: float, forwards: float, tail: float, weights: float) -> float:
    """Return the earliest time in seconds at which a device and the stages before it can be done.

    ::

        │ idle │ forwards │ idle │ the rest of its work, deferred W's last │ idle │
        ─ head ▶──────── turn ──▶              last I ▶──────── tail ────────────▶

    Args:
        head: seconds before its first forward can begin.
        work: seconds of all its operations.
        turn: seconds from its first forward to the first gradient; only forwards can run in this time.
        forwards: seconds of forwards available for this time.
        tail: seconds from its last I until the earlier stages are done; only deferred W's can run in this time.
        weights: seconds of deferred W's available for this time.
    """
    return head + work + max(0.0, turn - forwards) + max(0.0, tail - weights)


def work_bound(problem: Problem, trip: Trip, from_zero: bool = True) -> float:
    """Return the latest of the earliest end times of all devices in seconds; see :func:`end_of_work`.

    Memory limits the forwards and deferred W's that a device can run while it waits.

    Args:
        problem: the operations.
        trip: of the problem.
        from_zero: True for the makespan, False for the longest span of one device.
    """
    m = problem.micro_batches
    seconds = list(
        map(sum, zip(problem.forward, problem.backward_input, problem.backward_weight, strict=True))
    )
    first, last = [-1] * problem.devices, [-1] * problem.devices
    work, forwards, weights = ([0.0] * problem.devices for _ in range(3))
    for stage, device in enumerate(problem.device_of):
        first[device] = stage if first[device] < 0 else first[device]
        last[device] = stage
        work[device] += m * seconds[stage] + problem.recomputed[stage] * problem.recompute[stage]
        forwards[device] += m * problem.forward[stage]
        weights[device] += m * problem.backward_weight[stage]
    best = 0.0
    for device in range(problem.devices):
        if first[device] < 0:
            continue
        start, end = first[device], last[device]
        if problem.memory is not None and not any(problem.recomputed):
            limit = problem.memory.limit[device]
            stages = [stage for stage, home in enumerate(problem.device_of) if home == device]
            forwards[device] = _most_seconds(problem, stages, problem.forward, problem.memory.stash, limit)
            weights[device] = _most_seconds(
                problem, stages, problem.backward_weight, problem.memory.deferred, limit
            )
        done = end_of_work(
            trip.head[start] if from_zero else 0.0,
            work[device],
            trip.head[end] + trip.turn[end] - trip.head[start],
            forwards[device],
            trip.tail[start] if from_zero else 0.0,
            weights[device],
        )
        best = max(best, done)
    return best


def shared_work_bound(
    work: float, heads: Floats, speeds: Floats, micro_batches: int, action_seconds: float = 0.0
) -> float:
    """Return a lower bound in seconds for devices that share all work: any cut, any order.

    The bound is the X that solves ``sum(speed * (X - lost)) = work``, summed over the devices with ``lost < X``.
    ``lost`` is the time before a device can begin, plus the overhead of two actions per micro-batch.

    Args:
        work: seconds of all micro-batches on a device of speed 1.
        heads: seconds before each device can begin if all speeds are 1, ascending; the shorter of `heads` and `speeds`
            limits the number of devices.
        speeds: of the devices, descending.
        micro_batches: of each device.
        action_seconds: smallest overhead of an action on any device.
    """
    shares = list(zip(speeds, heads, strict=False))
    # Running sums over the devices: work lost while idle, and speed.
    idle = accumulate(
        speed * (head / speeds[0] + 2 * micro_batches * action_seconds) for speed, head in shares
    )
    speed_sums = accumulate(speed for speed, _ in shares)
    return min((work + lost) / speed for lost, speed in zip(idle, speed_sums, strict=True))


def _most_seconds(
    problem: Problem, stages: Sequence[int], seconds: Floats, sizes: Floats, room: float
) -> float:
    """Return the most seconds of F's (or W's) of a device whose stashes fit its memory at once.

    Solves the fractional knapsack: with several stages, the last micro-batch that fits may be a fraction.

    Args:
        problem: the operations.
        stages: the stages of the device.
        seconds: [stages of the problem]: seconds of one F (or W).
        sizes: [stages of the problem]: bytes that one F (or W) needs.
        room: bytes of the device.
    """
    m = problem.micro_batches
    total = 0.0
    for stage in sorted(
        stages, key=lambda stage: sizes[stage] / seconds[stage] if seconds[stage] else float("inf")
    ):
        fitting = min(m, room * SLACK / sizes[stage]) if sizes[stage] else m
        total += seconds[stage] * (fitting if len(stages) > 1 else int(fitting))
        room -= fitting * sizes[stage]
        if room <= 0:
            break
    return total


def _slots_bound(problem: Problem, trip: Trip, stage: int, from_zero: bool) -> float:
    """Lower bound in seconds: a stage runs its micro-batches in groups as large as fit its memory, one by one."""
    m, weight, memory = problem.micro_batches, problem.backward_weight[stage], problem.memory
    slots, released_late = m, False
    if memory is not None and (size := memory.stash[stage]):
        slots = int(min(m, memory.limit[problem.device_of[stage]] * SLACK / size))
        released_late = memory.deferred[stage] >= size
    round_trip = trip.turn[stage] + problem.backward_input[stage]
    groups, rest = divmod(m - 1, slots)
    begun = groups * (round_trip + weight * released_late) + rest * problem.forward[stage]
    if not from_zero:
        return begun + round_trip + weight
    return trip.head[stage] + begun + round_trip + max(trip.tail[stage], weight)


def _turnover_bound(problem: Problem, trip: Trip, device: int, from_zero: bool) -> float:
    """Lower bound in seconds: byte-seconds of all stashes of a device over its memory (Little's law)."""
    memory = problem.memory
    assert memory is not None
    stages = [stage for stage, home in enumerate(problem.device_of) if home == device]
    byte_seconds = sum(
        memory.stash[stage] * (trip.turn[stage] + problem.backward_input[stage])
        + memory.deferred[stage] * problem.backward_weight[stage]
        for stage in stages
    )
    if not byte_seconds:  # the device may have no memory for stashes at all
        return 0.0
    head = trip.head[stages[0]] if from_zero else 0.0
    return head + problem.micro_batches * byte_seconds / (memory.limit[device] * SLACK)
