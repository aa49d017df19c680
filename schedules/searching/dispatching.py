"""List scheduling: each free device runs the ready operation with the smallest key (about 1 microsecond each)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from random import Random

from .playing import fits, last_ends, play
from .problem import SLACK, Problem, Row

_NEVER = float("inf")
# Finding the next device takes this part of the time of an operation, for each device.
_OPERATIONS_PER_DEVICE = 0.02


@dataclass(frozen=True, slots=True)
class Rule:
    """Priority rule of the dispatcher.

    The key of an F or I is its start time in a steady state: a micro-batch begins each time the busiest device has
    finished a micro-batch. With spreads of 1, operations start without any waiting. Smaller spreads prefer old
    micro-batches; larger spreads prefer operations near the first stage.

    Attributes:
        forward_spread, backward_spread: factors of the time from the start of a micro-batch to its F's, and from there
            to its I's.
        weight_gap: a W runs only if no operation arrives within this fraction of its seconds.
        reserve: an F runs only if its device has free bytes for this fraction of the waiting messages and of the
            largest workspace.
        forward_gap: an F waits if an I arrives within this fraction of its seconds. If not 0, an F also waits for the I
            of micro-batch 0 if that arrives before the F ends, as all earlier devices wait for this I.
        in_flight: limit of the micro-batches between F and I of a stage, times the number of stages from this to the
            last. It keeps messages from piling up before a device with little memory. 1 is the limit of 1F1B.
    """

    forward_spread: float = 2.0
    backward_spread: float = 2.0
    weight_gap: float = 0.0
    reserve: float = 1.0
    forward_gap: float = 0.0
    in_flight: float = _NEVER

    def varied(self, random: Random, limited: bool) -> Rule:
        """Return a random variation of this rule. ``limited``: True if memory is limited."""
        return Rule(
            self.forward_spread + random.gauss(0, 0.4),
            self.backward_spread + random.gauss(0, 0.4),
            random.choice(_GAPS),
            random.choice(_RESERVES),
            self.forward_gap,
            random.choice(_IN_FLIGHT) if limited else self.in_flight,
        )


_GAPS = (0.0, 0.0, 0.3, 0.6, 1.0)
_RESERVES = (1.0, 0.6, 0.3, 0.0)
_IN_FLIGHT = (_NEVER, _NEVER, 2.0, 1.0)
# Most promising rule first.
RULES = [
    Rule(forward, backward, *gaps_and_reserve)
    for gaps_and_reserve, forward, backward in product(
        ((0.0, 0.3, 0.2), (0.0, 1.0, 0.0), (0.5, 0.3, 0.0)), (2.0, 0.6, -0.5), (2.0, 0.6, -0.5)
    )
]

# Also tried if memory is limited, after the first of `RULES`.
CAREFUL_RULES = [
    Rule(spread, spread, reserve=0.3, in_flight=in_flight)
    for in_flight, spread in product((1.0, 2.0), (2.0, -0.5))
]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The order that the dispatcher produced.

    Attributes:
        rows: the operations of each device, in order.
        done: [devices]: seconds at which each device ends its last operation; 0 for a device without operations.
    """

    rows: list[Row]
    done: list[float]

    @property
    def makespan(self) -> float:
        """Seconds at which the last operation ends."""
        return max(self.done)


def score(done: Sequence[float]) -> float:
    """Return the makespan plus the mean end time of the devices, in seconds: an objective for local search.

    A device that ends early does not shorten the step, but it can take layers from a busy device in a later move.

    Args:
        done: [devices]: seconds at which each device ends its last operation.
    """
    return max(done) + sum(done) / len(done)


def dispatching_work(problem: Problem) -> float:
    """Return the work of one call of :func:`dispatch` that is not cut off, in operations of an allowance."""
    return problem.operations * (1 + _OPERATIONS_PER_DEVICE * problem.devices)


def _keys(problem: Problem, rule: Rule) -> list[float]:
    """Return [F and I]: the key of each operation; smallest first. Keys of a stage grow with the micro-batch."""
    forward, backward = problem.forward, problem.backward_input
    load = [0.0] * problem.devices
    for stage, device in enumerate(problem.device_of):
        load[device] += forward[stage] + backward[stage] + problem.backward_weight[stage]
    offsets, passed = [], 0.0
    for seconds in forward:
        offsets.append(passed)
        passed += seconds * rule.forward_spread
    behind = [0.0] * problem.stages
    for stage in reversed(range(problem.stages)):
        behind[stage] = passed
        passed += backward[stage] * rule.backward_spread
    pace = max(load)
    starts = [k * pace for k in range(problem.micro_batches)]
    return [start + offset for offset in (*offsets, *behind) for start in starts]


# A single function for speed: a search calls it thousands of times a second.
def dispatch(problem: Problem, rule: Rule, limit: float = _NEVER) -> Dispatched | None:  # noqa: C901
    """Dispatch all operations: a free device runs the ready F or I with the smallest key, else a deferred W.

    Each stage runs the micro-batches in order.

    Args:
        problem: the operations.
        rule: gives the keys and the memory reserve.
        limit: largest `score` of interest, in seconds.

    Returns:
        The order; None if the memory is too small, or as soon as a lower bound of the score exceeds the limit.
    """
    if not problem.has_room:
        return None
    keys = _keys(problem, rule)
    m, p, device_of, seconds = problem.micro_batches, problem.devices, problem.device_of, problem.seconds
    stages, before, whole, memory = problem.stages, problem.recompute_before, problem.whole, problem.memory
    weight_gap = rule.weight_gap
    stride = stages * m  # from the F of a stage and micro-batch to its I, and from there to its W
    last = stride - m  # from here on, an F is of the last stage
    home = [device for device in device_of for _ in range(m)]
    delay_forward, delay_backward = problem.delay_forward, problem.delay_backward
    hold_forward, hold_backward = problem.hold_forward, problem.hold_backward
    links: dict[int, float] = {}  # when a link is free
    delay = hold = 0.0
    limits: Sequence[float] = ()
    stash: Sequence[float] = ()
    deferred: Sequence[float] = ()
    needed: Sequence[float] = ()
    messages: Sequence[float] = ()  # [2 * stages]: bytes of messages waiting for F and for I
    if memory is not None:
        limits = [
            limit * SLACK - rule.reserve * size
            for limit, size in zip(memory.limit, problem.passing, strict=True)
        ]
        stash, deferred, needed = problem.stash, problem.deferred, problem.needed
        messages = [rule.reserve * size for size in (*memory.inputs, *memory.gradients)]
    most = [rule.in_flight * (stages - stage) for stage in range(stages)]
    turned = [0] * stages  # micro-batches whose I has begun
    used = [0.0] * p
    ends = [0.0] * (3 * stride)
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
    for parts in (problem.forward, problem.backward_input, problem.backward_weight):
        for device, length in zip(device_of, parts, strict=True):
            due[device] += length * m
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
        if ready:
            stage = ready[0][1] // m
            if ready[0][1] % m - turned[stage] >= most[stage] or (
                memory is not None and used[device] + needed[stage] > limits[device]
            ):
                blocked, take_forward = True, False
        if (
            take_forward
            and rule.forward_gap
            and arriving
            and arriving[0][1] >= stride
            and arriving[0][0] - now
            < seconds[ready[0][1]] * (1.0 if arriving[0][1] % m == 0 else rule.forward_gap)
        ):
            wake[device] = arriving[0][0]
            continue
        if take_forward or back:
            operation = heappop(ready if take_forward else back)[1]
            end = now + seconds[operation] + (before[operation] if before else 0.0)
            rows[device].append(operation)
            left -= 1
            if operation < stride:
                if memory is not None:
                    used[device] += stash[operation] - messages[operation // m]
                if operation < last:
                    following = operation + m
                    delay, hold = delay_forward[following // m], hold_forward[following // m]
                else:
                    following, delay, hold = operation + stride, 0.0, 0.0
            else:
                stage = operation // m - stages
                turned[stage] += 1
                if memory is not None:
                    used[device] += deferred[stage] - stash[operation - stride] - messages[stages + stage]
                if whole[stage]:
                    rows[device].append(operation + stride)
                    left -= 1
                else:
                    weights[device].append(operation + stride)
                following = operation - m
                if following >= stride:
                    delay, hold = delay_backward[stage - 1], hold_backward[stage - 1]
                else:
                    following = -1
            if following >= 0:
                target, arrival = home[following % stride], end + delay
                if hold:
                    link = device * p + target
                    leaves = links.get(link, 0.0)
                    if leaves > end:
                        arrival += leaves - end
                        links[link] = leaves + hold
                    else:
                        links[link] = end + hold
                heappush(waiting[target], (arrival, following))
                if target != device:
                    soonest = free[target] if free[target] > arrival else arrival
                    if soonest < wake[target]:
                        wake[target] = soonest
                    if memory is not None:
                        used[target] += messages[following // m]
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
            if memory is not None:
                used[device] -= deferred[operation // m - 2 * stages]
        else:
            wake[device] = arriving[0][0] if arriving else _NEVER
            continue
        if now > free[device]:
            due[device] += now - free[device]
            total += now - free[device]
            if max(due) + total / p > limit:
                return None
        free[device] = wake[device] = ends[operation] = end
    if before:  # a recompute may begin before its gradient is there
        ends = play(problem, rows) or ends
        free = last_ends(rows, ends)
    return Dispatched(rows, free) if fits(problem, rows, ends) else None
