"""Lower bounds: seconds that no schedule can beat, from the trip of one micro-batch and the work of the devices."""

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
    """Return seconds that no schedule without overlapped pairs of actions can beat.

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
    check_objective(objective)
    places = [tuple(placement)] if len(placement) else placements(costs.stages, devices)
    problems = [
        make_problem(costs.cheapest, devices, micro_batches, memory, device_of) for device_of in places
    ]
    return min(problem_bound(problem, objective) for problem in problems)


def problem_bound(problem: Problem, objective: str = "makespan") -> float:
    """Return seconds that no order of a problem's operations can beat, with costs that are the cheapest."""
    from_zero = objective == "makespan"
    trip = trip_of(problem)
    bounds = [work_bound(problem, trip, from_zero)]
    bounds += [_slots_bound(problem, trip, stage, from_zero) for stage in range(problem.stages)]
    if problem.memory is not None:
        bounds += [_turnover_bound(problem, trip, device, from_zero) for device in range(problem.devices)]
    return max(bounds)


class Trip:
    """The trip of one micro-batch through all stages (or layers) and back, without any waiting.

    ::

        F of stages before │ F of the stage and those behind, their I │ I, W │ I of stages before, W of the first
        ───── head ───────▶│───────────────── turn ──────────────────▶│      │──────────── tail ────────────────▶

    Args:
        forward, backward_input, backward_weight: [stages]: seconds.
        hops, hops_back: [stages]: seconds that the input of each F, and of each I, travels; none for zeros.
        sources: of each stage, the earlier stages whose outputs it uses; none for a chain.

    Attributes:
        head: [stages]: when the F can begin.
        turn: [stages]: seconds from then until the I can begin.
        tail: [stages]: seconds from the end of the I until all earlier stages have done their I and W.
    """

    def __init__(
        self,
        forward: Floats,
        backward_input: Floats,
        backward_weight: Floats,
        hops: Floats = (),
        hops_back: Floats = (),
        sources: Sequence[Sequence[int]] | None = None,
    ) -> None:
        stages = len(forward)
        zeros = [0.0] * stages
        hops, hops_back = hops or zeros, hops_back or zeros
        sources = sources or [[stage - 1] if stage else [] for stage in range(stages)]
        self.head, self.tail = [0.0] * stages, [0.0] * stages
        there, back = [0.0] * stages, [0.0] * stages  # the longest way on from each stage, and back to it
        for stage, before in enumerate(sources):
            for source in before:
                self.head[stage] = max(self.head[stage], self.head[source] + forward[source] + hops[stage])
                after = backward_input[source] + max(self.tail[source], backward_weight[source])
                self.tail[stage] = max(self.tail[stage], hops_back[source] + after)
        for stage in reversed(range(stages)):
            for source in sources[stage]:
                there[source] = max(there[source], hops[stage] + forward[stage] + there[stage])
                back[source] = max(back[source], back[stage] + backward_input[stage] + hops_back[source])
        self.turn = list(map(sum, zip(forward, there, back, strict=True)))


def trip_of(problem: Problem) -> Trip:
    """Return the trip of a micro-batch through the stages of a problem, without recomputes."""
    return Trip(
        problem.forward,
        problem.backward_input,
        problem.backward_weight,
        problem.delay_forward,
        problem.delay_backward,
    )


def end_of_work(head: float, work: float, turn: float, forwards: float, tail: float, weights: float) -> float:
    """Return seconds before which a device cannot have done its work, and the stages before it theirs.

    ::

        │ idle │ forwards │ idle │ the rest of its work, deferred W's last │ idle │
        ─ head ▶──────── turn ──▶              last I ▶──────── tail ────────────▶

    Args:
        head: until its first forward can begin.
        work: all that it has to do.
        turn: from its first forward until a gradient can have come back; before that it has forwards only.
        forwards: the work that it has for this time.
        tail: from its last I until the earlier stages are done; the device has deferred W's only.
        weights: the work that it has for this time.
    """
    return head + work + max(0.0, turn - forwards) + max(0.0, tail - weights)


def work_bound(problem: Problem, trip: Trip, from_zero: bool = True) -> float:
    """Return when all devices can be done with their work, less what memory lets them do while they wait."""
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
    """Return the least seconds in which devices can do all work together: any cut, any order.

    The least X such that the sum of speed * (X - lost) over the devices that lose less than X is the work. A device
    loses the time until it can begin, and that for two actions of each micro-batch.

    Args:
        work: seconds of all micro-batches on a device of speed 1.
        heads: seconds after which the devices can begin on devices of speed 1, ascending; further ones are not used.
        speeds: of the devices, descending.
        micro_batches: of each device.
        action_seconds: what every device takes for each action, at the least.
    """
    shares = list(zip(speeds, heads, strict=False))
    # Of the first device, the first two, ...: work that they could have done while they are idle, and their speed.
    idle = accumulate(
        speed * (head / speeds[0] + 2 * micro_batches * action_seconds) for speed, head in shares
    )
    speed_sums = accumulate(speed for speed, _ in shares)
    return min((work + lost) / speed for lost, speed in zip(idle, speed_sums, strict=True))


def _most_seconds(
    problem: Problem, stages: Sequence[int], seconds: Floats, sizes: Floats, room: float
) -> float:
    """The most seconds of one kind of work whose stashes fit at once; with several stages, fractions count."""
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
    """The micro-batches of a stage in groups of as many as fit, one group after the other."""
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
    """Bytes times the seconds for which each is kept, over the bytes that the device has."""
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
