"""A schedule and its costs, played: when each action starts and ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, pairwise

import numpy as np

from ..core.action import COMMUNICATION, Kind, ScheduleError
from ..core.costs import StageCosts
from ..core.dependencies import Dependencies, dependencies
from ..core.schedule import Schedule
from ..transforms.passes import split_overlaps
from .memory import stash_peaks
from .timeline import Timeline
from .transfers import SentAndArrived, Transfers

_Rows = tuple[tuple[float, ...], ...]
_NONE = -1
_PENDING = -1.0


def simulate(schedule: Schedule, costs: StageCosts, contention: bool = False) -> Timeline:
    """Return when each action starts and ends, if each device runs its list in order as early as it can.

    A message leaves when the action that makes it ends (or at its SEND, where the schedule has sends) and
    arrives after the time on the link plus its latency; it holds up neither device. With `contention`, a link
    carries one message at a time, in the order in which they are sent; otherwise any number. The time is
    linear in the number of actions. Where the model has several copies, the costs are those of the stages of
    one, or of all, copy after copy.

    Where nothing of an overlapped pair is hidden (`costs.overlap` is 0), the timeline is that of the schedule
    with its pairs taken apart.

    Raises ScheduleError when the costs are for another number of stages, or the devices wait for each other
    for ever. The schedule is taken to be one that passes `check`.

    >>> from schedules import build
    >>> costs = StageCosts([1, 1], [1, 1], [1, 1])
    >>> simulate(build("1f1b", devices=2, micro_batches=4), costs).makespan
    15.0
    """
    if costs.stages not in (schedule.model_stages, schedule.stages):
        raise ScheduleError(
            f"the costs are for {costs.stages} stages, {schedule.name} has {schedule.model_stages}"
        )
    if not costs.overlap:
        schedule = split_overlaps(schedule)
    costs = costs.for_stages(schedule.stages)
    found = dependencies(schedule)
    starts, ends, sent_and_arrived = _play(schedule, costs, found, contention)
    peaks = stash_peaks(schedule, costs, found)
    return Timeline(
        schedule,
        starts,
        ends,
        tuple(float(peak) for peak, _ in peaks),
        tuple(row[position] if row else 0.0 for row, (_, position) in zip(starts, peaks, strict=True)),
        Transfers(found, costs, sent_and_arrived),
    )


def _play(
    schedule: Schedule, costs: StageCosts, found: Dependencies, contention: bool
) -> tuple[_Rows, _Rows, SentAndArrived]:
    """Start and end of each action, one row per device, and the times of the message of each edge."""
    seconds = _durations(costs, found)
    latency, occupancy, link = _messages(schedule, costs, found)
    one_to_one = all(np.bincount(end, minlength=1).max() <= 1 for end in (found.source, found.target))
    if one_to_one and not contention and not found.is_kind(*COMMUNICATION).any():
        delay = latency + occupancy
        starts, ends = _play_one_to_one(schedule, found, seconds, delay)
        return starts, ends, partial(_sent_at_the_end, found, ends, delay)
    played = _MessagePlay(schedule, found, seconds, latency, occupancy, link if contention else None)
    starts, ends = played.play()
    return starts, ends, lambda: (np.asarray(played.departure), np.asarray(played.arrival))


def _sent_at_the_end(found: Dependencies, ends: _Rows, delay: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When the message of each edge leaves and arrives, if none waits for its link."""
    sent = np.fromiter(chain.from_iterable(ends), float, found.actions)[found.source]
    return sent, sent + delay


def _durations(costs: StageCosts, found: Dependencies) -> np.ndarray:
    """Seconds of each action."""
    of_kind = {
        Kind.F: np.asarray(costs.forward),
        Kind.I: np.asarray(costs.backward_input),
        Kind.W: np.asarray(costs.backward_weight),
        Kind.B: np.asarray(costs.backward),
        Kind.RECOMPUTE: np.asarray(costs.recompute),
        Kind.REDUCE_GRAD: np.asarray(costs.reduce_grad),
        Kind.OPT_STEP: np.asarray(costs.optimizer_step),
    }
    leaf_seconds = np.zeros(found.code.size)
    for kind, seconds in of_kind.items():
        rows = found.is_kind(kind)
        leaf_seconds[rows] = seconds[found.stage[rows]]
    seconds = np.bincount(found.owner, leaf_seconds, found.actions)
    second_leaf = np.flatnonzero(found.owner[1:] == found.owner[:-1]) + 1
    hidden = costs.overlap * np.minimum(leaf_seconds[second_leaf], leaf_seconds[second_leaf - 1])
    seconds[found.owner[second_leaf]] -= hidden
    return seconds


def _messages(schedule: Schedule, costs: StageCosts, found: Dependencies) -> tuple[np.ndarray, ...]:
    """Latency, occupancy of the link, and number of the link, for each edge; zero within a device."""
    stages = schedule.stages
    latency, occupancy, link = np.zeros((3, stages, stages))
    for source, target in _neighbours(schedule):
        devices = schedule.device_of[source], schedule.device_of[target]
        size = costs.message_bytes[min(source, target)]
        latency[source, target] = costs.latency_between(*devices)
        occupancy[source, target] = costs.occupancy_between(*devices, size)
        link[source, target] = devices[0] * schedule.devices + devices[1]
    ends = found.source_stage, found.target_stage
    return latency[ends], occupancy[ends], link[ends].astype(np.int64)


def _neighbours(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The pairs of stages between which a message may pass."""
    for stage in range(schedule.stages):
        following = schedule.next_stage(stage)
        if following is not None:
            yield stage, following
            yield following, stage


def _play_one_to_one(
    schedule: Schedule, found: Dependencies, seconds: np.ndarray, delay: np.ndarray
) -> tuple[_Rows, _Rows]:
    """Start and end of each action where edges share no end: the case that has to be fast."""
    # The list of a device is closed by a slot whose input never comes: the loop need not test for its end.
    devices = np.arange(schedule.devices)
    slot = np.arange(found.actions) + np.repeat(devices, np.diff(found.offsets))
    slots = found.actions + schedule.devices
    inputs, delays, lengths = np.full(slots, _NONE), np.zeros(slots), np.zeros(slots)
    inputs[np.asarray(found.offsets[1:]) + devices] = slots
    inputs[slot[found.target]] = slot[found.source]
    delays[slot[found.target]] = delay
    lengths[slot] = seconds
    firsts = [offset + device for device, offset in enumerate(found.offsets[:-1])]
    starts, ends, stops = _run(firsts, inputs.tolist(), delays.tolist(), lengths.tolist())
    _refuse_deadlock(schedule, [stop - first for stop, first in zip(stops, firsts, strict=True)])
    spans = list(zip(firsts, stops, strict=True))
    return tuple(tuple(starts[a:b]) for a, b in spans), tuple(tuple(ends[a:b]) for a, b in spans)


def _run(
    position: list[int], input_of: list[int], delay_of: list[float], length_of: list[float]
) -> tuple[list[float], list[float], list[int]]:
    """Start and end of each slot, and the slot at which each device stops; `position` is where they begin."""
    starts, ends = [_PENDING] * len(input_of), [_PENDING] * (len(input_of) + 1)
    position = list(position)
    clock = [0.0] * len(position)
    able = list(range(len(position)))[::-1]
    while able:
        device = able.pop()
        slot, now = position[device], clock[device]
        while True:
            needed = input_of[slot]
            if needed >= 0:
                ready = ends[needed]
                if ready < 0:
                    break
                ready += delay_of[slot]
                if ready > now:
                    now = ready
            starts[slot] = now
            now += length_of[slot]
            awaited = ends[slot]
            ends[slot] = now
            if awaited < _PENDING:
                able.append(int(_PENDING - 1 - awaited))
            slot += 1
        ends[needed] = _PENDING - 1 - device  # this device waits for it
        position[device], clock[device] = slot, now
    return starts, ends, position


class _MessagePlay:
    """The general case: several inputs to an action, sends and receives, links that carry one at a time."""

    def __init__(
        self,
        schedule: Schedule,
        found: Dependencies,
        seconds: np.ndarray,
        latency: np.ndarray,
        occupancy: np.ndarray,
        link: np.ndarray | None,
    ) -> None:
        self.schedule, self.found = schedule, found
        self.seconds = seconds.tolist()
        self.latency, self.occupancy = latency.tolist(), occupancy.tolist()
        self.link = None if link is None else link.tolist()
        self.link_free = [0.0] * schedule.devices**2
        self.is_message = np.zeros(found.actions, dtype=bool)
        self.is_message[found.owner[found.is_kind(*COMMUNICATION)]] = True
        self.edges_in: list[list[int]] = [[] for _ in range(found.actions)]
        self.edges_out: list[list[int]] = [[] for _ in range(found.actions)]
        for edge, (source, target) in enumerate(zip(found.source.tolist(), self._readers(), strict=True)):
            self.edges_out[source].append(edge)
            self.edges_in[target].append(edge)
        self.departure, self.arrival = [0.0] * found.source.size, [_PENDING] * found.source.size
        self.starts, self.ends = [0.0] * found.actions, [0.0] * found.actions

    def play(self) -> tuple[_Rows, _Rows]:
        """Start and end of each action, one row per device."""
        clock = [0.0] * self.schedule.devices
        position = list(self.found.offsets[:-1])
        waiting: dict[int, int] = {}  # edge -> the device that waits for it
        able = list(range(self.schedule.devices))[::-1]
        while able:
            device = able.pop()
            while position[device] < self.found.offsets[device + 1]:
                action = position[device]
                edges = self.edges_in[action]
                missing = next((edge for edge in edges if self.arrival[edge] < 0), None)
                if missing is not None:
                    waiting[missing] = device
                    break
                clock[device] = self._act(
                    action, max([clock[device], *(self.arrival[edge] for edge in edges)])
                )
                able += (waiting.pop(edge) for edge in self.edges_out[action] if edge in waiting)
                position[device] += 1
        offsets = self.found.offsets
        _refuse_deadlock(self.schedule, [at - first for at, first in zip(position, offsets, strict=False)])
        self._end_receives()
        spans = list(pairwise(offsets))
        return tuple(tuple(self.starts[a:b]) for a, b in spans), tuple(
            tuple(self.ends[a:b]) for a, b in spans
        )

    def _act(self, action: int, start: float) -> float:
        """Play one action, send off what it makes, and return when its device is free again."""
        self.starts[action] = start
        end = start + self.seconds[action]
        self.ends[action] = end
        for edge in self.edges_out[action]:
            departure = end
            if self.link is not None and self.occupancy[edge]:
                departure = max(end, self.link_free[self.link[edge]])
                self.link_free[self.link[edge]] = departure + self.occupancy[edge]
            self.departure[edge] = departure
            self.arrival[edge] = departure + self.occupancy[edge] + self.latency[edge]
            if self.is_message[action]:
                self.ends[action] = self.arrival[edge]
        return end

    def _readers(self) -> list[int]:
        """The target of each edge; the action that reads a message waits for it, not its receive."""
        reader = np.arange(self.found.actions)
        from_receive = self.is_message[self.found.source] & ~self.is_message[self.found.target]
        reader[self.found.source[from_receive]] = self.found.target[from_receive]
        return reader[self.found.target].tolist()

    def _end_receives(self) -> None:
        """A receive ends when its message is there."""
        arrivals = zip(self.found.target.tolist(), self.arrival, strict=True)
        for target, arrival in arrivals:
            if self.is_message[target]:
                self.ends[target] = max(self.starts[target], arrival)


def _refuse_deadlock(schedule: Schedule, position: Sequence[int]) -> None:
    stuck = [
        f"device {device} at {row[stop]}"
        for device, (row, stop) in enumerate(zip(schedule.actions, position, strict=True))
        if stop < len(row)
    ]
    if stuck:
        raise ScheduleError(f"{schedule.name} deadlocks: {', '.join(stuck)} wait for each other")
