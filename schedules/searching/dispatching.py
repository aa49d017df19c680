"""Dispatching: each device runs the most urgent operation that is ready, in about a microsecond an operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from .problem import F, I, Problem, Row

_NEVER = float("inf")
_SLACK = 1 + 1e-9


class Room(NamedTuple):
    """Memory for stashes, in bytes.

    limit: of each device.
    stash: of each F, what it keeps from its start on.
    deferred: of each I, what it leaves for its W.
    most: of each device, the most that an operation keeps besides while it runs, as an I that recomputes does.
    needs: of each stage, the bytes that must be free before a forward: its stash, those of the device's later stages
        for one micro-batch, and what is in `most`. So the oldest micro-batch can always go on.
    """

    limit: Sequence[float]
    stash: Sequence[float]
    deferred: Sequence[float]
    most: Sequence[float]
    needs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of one step on a placement. Each is a number: (kind * stages + stage) * micro_batches + k.

    Attributes:
        devices, micro_batches: their numbers.
        device_of: the device of each stage.
        seconds: of each F, I and W; a W of 0 seconds behind its I is a full backward.
        before: of each F and I, seconds of what runs right before it and needs no input: a recompute; empty for none.
        delay_forward, delay_backward: of each stage, seconds that the input of its F, and of its I, travels.
        hold_forward, hold_backward: likewise, the seconds of these for which it holds the link. The link from a device
            to another carries one message at a time.
        fused: of each stage, whether W follows its I at once and the I has the seconds of both.
        room: the memory; None without limits.
    """

    devices: int
    micro_batches: int
    device_of: Sequence[int]
    seconds: Sequence[float]
    before: Sequence[float]
    delay_forward: Sequence[float]
    delay_backward: Sequence[float]
    hold_forward: Sequence[float]
    hold_backward: Sequence[float]
    fused: Sequence[bool]
    room: Room | None = None

    @property
    def stages(self) -> int:
        """How many stages."""
        return len(self.device_of)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What the dispatcher made.

    Attributes:
        rows: the operations of each device, in order.
        ends: when each device is done; 0 for one without operations.
    """

    rows: list[Row]
    ends: list[float]

    @property
    def makespan(self) -> float:
        """When the last operation ends."""
        return max(self.ends)

    @property
    def score(self) -> float:
        """The makespan and the mean end of the devices: what a search may minimise.

        An idle device that ends early makes the step no shorter, but its layers and those of a busy one may then be
        shared out anew.
        """
        return max(self.ends) + sum(self.ends) / len(self.ends)


def work_of(problem: Problem) -> Work:
    """Return the operations of a problem, with backwards in two parts and links that carry any number of messages."""
    m, stages = problem.micro_batches, problem.stages
    ahead = [problem.delay[problem.operation(F, stage, 0)] for stage in range(stages)]
    back = [problem.delay[problem.operation(I, stage, 0)] for stage in range(stages)]
    room = None
    if min(problem.memory) < _NEVER:
        stash, deferred = problem.costs.stash_bytes, problem.costs.weight_stash_bytes
        needs, later = [0.0] * stages, [0.0] * problem.devices
        for stage in reversed(range(stages)):
            device = problem.device_of[stage]
            later[device] += stash[stage]
            needs[stage] = later[device]
        per_forward, per_input = ([size for size in sizes for _ in range(m)] for sizes in (stash, deferred))
        room = Room(problem.memory, per_forward, per_input, [0.0] * problem.devices, needs)
    zeros = [0.0] * stages
    return Work(
        problem.devices,
        m,
        problem.device_of,
        problem.seconds,
        (),
        ahead,
        back,
        zeros,
        zeros,
        [False] * stages,
        room,
    )


def steady_keys(work: Work, spread: float, spread_back: float) -> list[float]:
    """Return keys that follow a steady state: a micro-batch begins as often as the busiest device can take one.

    With spreads of 1 the key of an operation is its start if nothing ever waits. Smaller spreads let old micro-batches
    go first, larger ones operations near the first stage.

    Args:
        work: the operations.
        spread, spread_back: factors of the time from the start of a micro-batch to its operations: F's, and I's.
    """
    m, seconds, stages = work.micro_batches, work.seconds, work.stages
    per_device = [0.0] * work.devices
    forward = [seconds[stage * m] for stage in range(stages)]
    backward = [seconds[(stages + stage) * m] for stage in range(stages)]
    for stage, device in enumerate(work.device_of):
        weight = seconds[(2 * stages + stage) * m]
        per_device[device] += forward[stage] + backward[stage] + weight
    pace = max(per_device)
    offsets, passed = [], 0.0
    for one in forward:
        offsets.append(passed)
        passed += one * spread
    behind = [0.0] * stages
    for stage in reversed(range(stages)):
        behind[stage] = passed
        passed += backward[stage] * spread_back
    starts = [k * pace for k in range(m)]
    return [start + offset for offset in (*offsets, *behind) for start in starts]


# One function, as a search runs it thousands of times a second.
def dispatch(  # noqa: C901
    work: Work, keys: Sequence[float], weight_gap: float = 0.0, limit: float = _NEVER
) -> Dispatched | None:
    """Let every device run the most urgent F or I that is ready whenever it is free, and a W if none is.

    Micro-batches keep their order on each stage if the keys of each stage and kind grow with the micro-batch.

    Args:
        work: the operations.
        keys: of each F and I; the smallest goes first.
        weight_gap: a W runs if the next operation comes after this part of it or later.
        limit: of `Dispatched.score`.

    Returns:
        The rows, or None if the memory is not enough to end the step, or as soon as the score must be above the limit.
    """
    m, p, device_of, seconds, before = (
        work.micro_batches,
        work.devices,
        work.device_of,
        work.seconds,
        work.before,
    )
    stages = len(device_of)
    stride = stages * m  # from the F of a stage and micro-batch to its I, and from there to its W
    last = stride - m  # from here on, an F is of the last stage
    home = [device for device in device_of for _ in range(m)]
    delay_forward, delay_backward = work.delay_forward, work.delay_backward
    hold_forward, hold_backward = work.hold_forward, work.hold_backward
    room, fused = work.room, work.fused
    links = [[0.0] * p for _ in range(p)]  # when a link is free
    delay = hold = 0.0
    used = [0.0] * p
    waiting: list[list[tuple[float, int]]] = [[] for _ in range(p)]  # on their way: (arrival, operation)
    forwards: list[list[tuple[float, int]]] = [[] for _ in range(p)]  # ready: (key, operation)
    backwards: list[list[tuple[float, int]]] = [[] for _ in range(p)]
    weights: list[deque[int]] = [deque() for _ in range(p)]
    rows: list[Row] = [[] for _ in range(p)]
    free, wake = [0.0] * p, [_NEVER] * p  # when a device is free, and when it decides next
    for k in range(m):
        waiting[device_of[0]].append((0.0, k))
    wake[device_of[0]] = 0.0
    due = [0.0] * p  # when a device can be done with all its operations
    for stage, device in enumerate(device_of):
        for stream in (stage, stages + stage, 2 * stages + stage):
            due[device] += seconds[stream * m] * m
    if before:
        for operation in range(stride, 2 * stride):
            due[home[operation - stride]] += before[operation]
    total = sum(due)
    left = 3 * stride
    while left:
        now = min(wake)
        if now == _NEVER:
            return None
        device = wake.index(now)
        arriving, ready, back = waiting[device], forwards[device], backwards[device]
        while arriving and arriving[0][0] <= now:
            operation = heappop(arriving)[1]
            heappush(ready if operation < stride else back, (keys[operation], operation))
        take_forward = ready and (not back or ready[0] < back[0])
        blocked = False
        if (
            ready
            and room is not None
            and used[device] + room.needs[ready[0][1] // m] > room.limit[device] * _SLACK
        ):
            blocked, take_forward = True, False
        if take_forward or back:
            operation = heappop(ready if take_forward else back)[1]
            end = now + seconds[operation] + (before[operation] if before else 0.0)
            rows[device].append(operation)
            left -= 1
            if operation < stride:
                if room is not None:
                    used[device] += room.stash[operation]
                if operation < last:
                    following = operation + m
                    delay, hold = delay_forward[following // m], hold_forward[following // m]
                else:
                    following, delay, hold = operation + stride, 0.0, 0.0
            else:
                if room is not None:
                    used[device] += room.deferred[operation - stride] - room.stash[operation - stride]
                if fused[operation // m - stages]:
                    rows[device].append(operation + stride)
                    left -= 1
                    if room is not None:
                        used[device] -= room.deferred[operation - stride]
                else:
                    weights[device].append(operation + stride)
                following = operation - m
                if following >= stride:
                    stage = following // m - stages
                    delay, hold = delay_backward[stage], hold_backward[stage]
                else:
                    following = -1
            if following >= 0:
                target, arrival = home[following % stride], end + delay
                if hold:
                    waits = links[device][target] - end
                    if waits > 0:
                        arrival += waits
                    links[device][target] = end + hold + max(waits, 0.0)
                heappush(waiting[target], (arrival, following))
                if target != device:
                    soonest = free[target] if free[target] > arrival else arrival
                    if soonest < wake[target]:
                        wake[target] = soonest
        elif weights[device]:
            operation = weights[device][0]
            if (
                arriving
                and not blocked
                and weight_gap
                and arriving[0][0] - now < weight_gap * seconds[operation]
            ):
                wake[device] = arriving[0][0]
                continue
            weights[device].popleft()
            rows[device].append(operation)
            left -= 1
            end = now + seconds[operation]
            if room is not None:
                used[device] -= room.deferred[operation - 2 * stride]
        else:
            wake[device] = arriving[0][0] if arriving else _NEVER
            continue
        if now > free[device]:
            due[device] += now - free[device]
            total += now - free[device]
            if max(due) + total / p > limit:
                return None
        free[device] = wake[device] = end
    return Dispatched(rows, free)


def play_rows(work: Work, rows: Sequence[Row]) -> list[float] | None:
    """Return when each device is done if it runs its row in order; None if the devices wait for each other for ever."""
    m, stages, seconds, before = work.micro_batches, work.stages, work.seconds, work.before
    stride = stages * m
    home = [device for device in work.device_of for _ in range(m)]
    arrival = [_NEVER] * (2 * stride)  # of the input of each F and I
    arrival[:m] = [0.0] * m
    awaited = [False] * (2 * stride)
    links = [[0.0] * work.devices for _ in range(work.devices)]
    position, clock = [0] * work.devices, [0.0] * work.devices
    able = list(range(work.devices))
    while able:
        device = able.pop()
        row, now, at = rows[device], clock[device], position[device]
        while at < len(row):
            operation = row[at]
            if operation < 2 * stride:
                if arrival[operation] == _NEVER:
                    awaited[operation] = True
                    break
                now = max(now + (before[operation] if before else 0.0), arrival[operation])
            now += seconds[operation]
            at += 1
            following, delay, hold = _following(work, operation)
            if following >= 0:
                leaves = now
                if hold:
                    target = home[following % stride]
                    leaves = max(now, links[device][target])
                    links[device][target] = leaves + hold
                arrival[following] = leaves + delay
                if awaited[following]:
                    able.append(home[following % stride])
        position[device], clock[device] = at, now
    return clock if all(at == len(row) for at, row in zip(position, rows, strict=True)) else None


def _following(work: Work, operation: int) -> tuple[int, float, float]:
    """The F or I that needs the result of an operation, and the delay and hold of the message; -1 for none."""
    m, stride = work.micro_batches, work.stages * work.micro_batches
    if operation < stride - m:
        stage = operation // m + 1
        return operation + m, work.delay_forward[stage], work.hold_forward[stage]
    if operation < stride:
        return operation + stride, 0.0, 0.0
    if stride + m <= operation < 2 * stride:
        stage = operation // m - work.stages - 1
        return operation - m, work.delay_backward[stage], work.hold_backward[stage]
    return -1, 0.0, 0.0
