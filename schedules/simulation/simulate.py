"""Simulates a schedule: computes the start and end of each action from the costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise

import numpy as np

from ..analysis.timeline import Timeline
from ..core.action import COMMUNICATION, Kind, ScheduleError
from ..core.costs import StageCosts
from ..core.dependencies import Dependencies, dependencies
from ..core.schedule import Schedule
from ..transforms.passes import split_overlaps
from .deadlock import refuse_deadlock
from .event_loop import play
from .memory import stash_peaks
from .operations import ActionOperations, make_operations
from .shared_ports import Message, play_shared, port_messages
from .skips import messages, with_skips
from .transfers import SentAndArrived, Transfers

_Rows = tuple[tuple[float, ...], ...]
_OF_A_MICRO_BATCH = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.RECOMPUTE)  # longer for more samples


def simulate(schedule: Schedule, costs: StageCosts, contention: bool = False) -> Timeline:
    """Return the timeline of a schedule in which each device runs its actions in order, as early as possible.

    A message leaves when the action that makes it ends (or at its SEND, where the schedule has sends). It arrives
    after the time on the link plus its latency, and blocks neither device. Copies between a device and its host run
    beside the computation, one at a time. Where nothing of an overlapped pair is
    hidden (``costs.overlap`` is 0), the pair runs as a forward and then a backward. The time taken is linear in the
    number of actions.

    Args:
        schedule: one that passes `check`.
        costs: of the stages of one copy of the model, or of all copies, copy after copy.
        contention: whether a link between two devices, and each of ``costs.ports``, carries one message at a time, in
            the order of their sending; otherwise they carry any number.

    Raises:
        ScheduleError: the costs are for another number of stages or micro-batches, or the devices wait for each other
            for ever.

    >>> from schedules import build
    >>> costs = StageCosts([1, 1], [1, 1], [1, 1])
    >>> simulate(build("1f1b", devices=2, micro_batches=4), costs).makespan
    15.0
    """
    costs = costs.for_schedule(schedule)
    if len(costs.micro_batch_scale) not in (0, schedule.micro_batches):
        raise ScheduleError(
            f"micro_batch_scale has {len(costs.micro_batch_scale)} numbers for {schedule.micro_batches} micro-batches"
        )
    if not costs.overlap:
        schedule = split_overlaps(schedule)
    found = with_skips(dependencies(schedule), schedule, costs)
    starts, ends, sent_and_arrived = _play(schedule, costs, found, contention)
    peaks = stash_peaks(schedule, costs, found)
    return Timeline(
        schedule,
        starts,
        ends,
        tuple(float(peak) for peak, _ in peaks),
        tuple(row[position] if row else 0.0 for row, (_, position) in zip(starts, peaks, strict=True)),
        Transfers(found, partial(_sizes, schedule, costs), sent_and_arrived),
    )


def _play(
    schedule: Schedule, costs: StageCosts, found: Dependencies, contention: bool
) -> tuple[_Rows, _Rows, SentAndArrived]:
    """Start and end of each action, one row per device, and the times of the message of each edge."""
    seconds = _durations(costs, found)
    latency, occupancy, link = _messages(schedule, costs, found)
    is_message = np.zeros(found.actions, dtype=bool)
    is_message[found.owner[found.is_kind(*COMMUNICATION)]] = True
    edges = found.source, _readers(found, is_message)
    through = port_messages(schedule, costs, found, occupancy) if contention and costs.ports else {}
    occupancy[list(through)] = [message.seconds for message in through.values()]
    carried = found.is_copy | contention
    delay = latency + np.where(carried, 0.0, occupancy)
    carried[list(through)] = False
    alone = np.where(carried, occupancy, 0.0)
    operations = make_operations(found.offsets, seconds, edges, delay, alone, link)
    ends_of_all, left, done = _ends(operations, through)
    ends = ends_of_all[operations.place]
    if not done:
        refuse_deadlock(schedule)
        raise ScheduleError(f"{schedule.name} deadlocks: messages that share links wait for each other")
    starts = _starts(found, operations, ends_of_all, left, latency + occupancy)
    sent_and_arrived = partial(_sent_and_arrived, operations, ends_of_all, left, latency, occupancy)
    if is_message.any():
        _, arrived = sent_and_arrived()
        both = is_message[found.source], is_message[found.target]
        ends[found.source[both[0]]] = arrived[both[0]]
        received = found.target[both[1]]
        ends[received] = np.maximum(starts[received], arrived[both[1]])
    spans = list(pairwise(found.offsets))
    every_start, every_end = starts.tolist(), ends.tolist()
    return (
        tuple(tuple(every_start[a:b]) for a, b in spans),
        tuple(tuple(every_end[a:b]) for a, b in spans),
        sent_and_arrived,
    )


def _readers(found: Dependencies, is_message: np.ndarray) -> np.ndarray:
    """The action that waits for each edge: for that of a send the reader of the message, not its receive."""
    reader = np.arange(found.actions)
    from_receive = is_message[found.source] & ~is_message[found.target]
    reader[found.source[from_receive]] = found.target[from_receive]
    return reader[found.target]


def _ends(
    operations: ActionOperations, through: Mapping[int, Message]
) -> tuple[np.ndarray, dict[int, float], bool]:
    """The end of each operation, when the message of each edge through ports left, and whether all have run."""
    if not through:
        played, done = play(operations.table, operations.rows)
        return np.asarray(played), {}, done
    receiver = operations.receiver[list(through)].tolist()
    of_receiver = dict(zip(receiver, through.values(), strict=True))
    played, done, left = play_shared(operations.table, operations.rows, of_receiver)
    pairs = zip(through, receiver, strict=True)
    return np.asarray(played), {edge: left[waiting] for edge, waiting in pairs if waiting in left}, done


def _starts(
    found: Dependencies,
    operations: ActionOperations,
    ends: np.ndarray,
    left: Mapping[int, float],
    travel: np.ndarray,
) -> np.ndarray:
    """The start of each action: when its device is free and its input is there.

    left: when the message of each edge through ports left.
    travel: of each edge, the seconds of its message once it has left.
    """
    place = operations.place
    first = np.asarray(found.offsets[:-1])[np.diff(found.offsets) > 0]
    free = ends[place - 1] if place.size else np.zeros(0)
    waits = place[first] - np.array(
        [row.start for row in operations.rows[: len(found.offsets) - 1] if len(row)]
    )
    free[first[waits == 0]] = 0.0
    source = np.asarray(operations.table.source)
    arrives = np.where(source >= 0, ends[source] + np.asarray(operations.table.delay), 0.0)
    through = list(left)
    arrives[operations.receiver[through]] = np.array([*left.values()]) + travel[through]
    return np.maximum(free, arrives[place])


def _sent_and_arrived(
    operations: ActionOperations,
    ends: np.ndarray,
    left: Mapping[int, float],
    latency: np.ndarray,
    occupancy: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """When the message of each edge leaves and arrives."""
    sent = ends[operations.sender]
    sent[list(left)] = list(left.values())
    arrived = sent + (latency + occupancy)
    on_link = ends[operations.carrier]
    arrived[operations.carried] = on_link + latency[operations.carried]
    leaves = on_link - occupancy[operations.carried]
    sent[operations.carried] = np.maximum(sent[operations.carried], leaves)
    return sent, arrived


def _durations(costs: StageCosts, found: Dependencies) -> np.ndarray:
    """Seconds of each action."""
    of_kind = {
        Kind.F: np.asarray(costs.forward),
        Kind.I: np.asarray(costs.backward_input),
        Kind.W: np.asarray(costs.backward_weight),
        Kind.B: np.asarray(costs.backward),
        Kind.RECOMPUTE: np.asarray(costs.recompute),
        Kind.OFFLOAD: np.asarray(costs.offload),
        Kind.RELOAD: np.asarray(costs.offload),
        Kind.REDUCE_GRAD: np.asarray(costs.reduce_grad),
        Kind.OPT_STEP: np.asarray(costs.optimizer_step),
    }
    leaf_seconds = np.zeros(found.code.size)
    for kind, seconds in of_kind.items():
        rows = found.is_kind(kind)
        leaf_seconds[rows] = seconds[found.stage[rows]]
    if len(costs.micro_batch_scale):
        scaled = found.is_kind(*_OF_A_MICRO_BATCH)
        leaf_seconds[scaled] *= np.asarray(costs.micro_batch_scale)[found.micro_batch[scaled]]
    seconds = np.bincount(found.owner, leaf_seconds, found.actions)
    second_leaf = np.flatnonzero(found.owner[1:] == found.owner[:-1]) + 1
    hidden = costs.overlap * np.minimum(leaf_seconds[second_leaf], leaf_seconds[second_leaf - 1])
    seconds[found.owner[second_leaf]] -= hidden
    return seconds


def _messages(schedule: Schedule, costs: StageCosts, found: Dependencies) -> tuple[np.ndarray, ...]:
    """Latency, occupancy of the link, and number of the link, for each edge; zero within a device."""
    latency, occupancy, link = np.zeros((3, schedule.stages, schedule.stages))
    for one, other, size in messages(schedule, costs):
        for source, target in ((one, other), (other, one)):
            devices = schedule.device_of[source], schedule.device_of[target]
            latency[source, target] = costs.latency_between(*devices)
            occupancy[source, target] = costs.occupancy_between(*devices, size)
            link[source, target] = devices[0] * schedule.devices + devices[1]
    every = range(schedule.stages)
    occupancy[every, every] = costs.host_copy  # of the edges from a stage to itself, only copies take time
    link[every, every] = schedule.devices**2 + np.asarray(schedule.device_of)
    ends = found.source_stage, found.target_stage
    taken = np.where((ends[0] == ends[1]) & ~found.is_copy, 0.0, occupancy[ends])
    return latency[ends], taken, link[ends].astype(np.int64)


def _sizes(schedule: Schedule, costs: StageCosts) -> Iterator[tuple[int, int, float]]:
    """Yield two stages and the bytes of a message between them; a stage twice and the bytes copied to its host."""
    yield from messages(schedule, costs)
    for stage, (stash, boundary) in enumerate(zip(costs.stash_bytes, costs.boundary_bytes, strict=True)):
        yield stage, stage, stash - boundary
