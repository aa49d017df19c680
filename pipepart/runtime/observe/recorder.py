"""Records the start and end of each action and message of a run, on the clocks of their devices.

::

    worker      recv ── start ══ compute ══ end ── send            waiting and the runtime's own time count as idle
    messages                                        sent ── arrived ── taken, when its action starts

A CPU uses the clock of the host. An accelerator runs asynchronously to the host, so events on its stream take the
times. They are converted to the host's clock when they are read. The error is about 20 µs, plus the drift of the two
clocks until then, which is microseconds per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from schedules import Kind, Schedule, Timeline, Transfer

from ...autograd.sparse import bytes_of
from ...workers.streams import has_streams, recorded
from ..stage import Stage
from ..transport.threads import Key, Transport

_now = time.perf_counter
_ANCHORS = 5
_SENDERS = frozenset({Kind.F, Kind.B, Kind.I, Kind.REDUCE_GRAD})

Compute = Callable[[Any, Any], Any]  # see pipepart.runtime.actions


class RankRecord(NamedTuple):
    """What the workers of one rank have recorded, on the clock of the day.

    Attributes:
        times: by row of the schedule, starts and ends of its actions.
        sent: messages that its stages have sent.
    """

    times: dict[int, tuple[list[float], ...]]
    sent: list[tuple[int, int, Key, int]]


class Recorder:
    """Records the times of one run, taken by its workers.

    Args:
        schedule: the actions.
        stages: those that it has.

    Attributes:
        sent: messages to other devices, each when the action that made it has ended: sender, receiver, key, bytes.
        arrivals: of messages that streams carry, filled in as they are sent.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[Stage]) -> None:
        self.schedule = schedule
        self.arrivals: dict[Key, torch.Event] = {}
        homes = dict(zip(schedule.device_of, (stage.device for stage in stages), strict=True))
        self.clocks = [_Clock(homes[row]) for row in range(schedule.devices)]
        self.sent: list[tuple[int, int, Key, int]] = []
        self._rows: Sequence[Sequence[Sequence[float]]] = ()

    def timed(self, kind: Kind, run: Any, compute: Compute) -> Compute:
        """Return the computation of a kind of action of a stage that notes its start and end."""
        clock = self.clocks[self.schedule.device_of[run.index]]
        starts, ends, now = clock.starts, clock.ends, clock.now

        def computed(micro_batch: int | None, received: Any) -> Any:
            starts.append(now())
            output = compute(micro_batch, received)
            ends.append(now())
            return output

        return computed

    def share(self, rows: Sequence[int], offset: float) -> RankRecord:
        """Return what the workers of one rank have recorded; waits for devices that still compute.

        Args:
            rows: of the schedule, those of the workers.
            offset: seconds to add to the times of this rank's clock to have those of the day.
        """
        times = {
            row: tuple([at + offset for at in moments] for moments in times)
            for row, times in enumerate(self._own_rows())
            if row in rows
        }
        return RankRecord(times, self.sent)

    def adopt(self, records: Sequence[RankRecord]) -> None:
        """Take over what the workers of all ranks have recorded."""
        self._rows = [
            next(record.times[row] for record in records if row in record.times)
            for row in range(self.schedule.devices)
        ]
        self.sent = [message for record in records for message in record.sent]

    def _own_rows(self) -> list[tuple[list[float], ...]]:
        return [
            tuple(list(map(clock.seconds, moments)) for moments in (clock.starts, clock.ends))
            for clock in self.clocks
        ]

    @cached_property
    def timeline(self) -> Timeline:
        """Return the timeline of the run, starting at 0 s; waits for devices that still compute."""
        rows = self._rows or self._own_rows()
        origin = min(start for starts, _ in rows for start in starts)
        starts, ends = ([[at - origin for at in row[which]] for row in rows] for which in (0, 1))
        clocks = {clock.device: clock for clock in self.clocks}
        arrived = {key: clocks[event.device].seconds(event) - origin for key, event in self.arrivals.items()}
        return Timeline(
            self.schedule,
            starts,
            ends,
            transfers=self._transfers(starts, ends, arrived),
        )

    def _transfers(
        self,
        starts: Sequence[Sequence[float]],
        ends: Sequence[Sequence[float]],
        arrived: Mapping[Key, float],
    ) -> tuple[Transfer, ...]:
        place = {
            (_carried(action.kind), action.stage, action.micro_batch): (device, position)
            for device, row in enumerate(self.schedule.actions)
            for position, action in enumerate(row)
            if action.kind in _SENDERS
        }
        transfers = []
        for sender, receiver, key, size in self.sent:
            kind, micro_batch = _carried(key[0]), _micro_batch(key)
            device, position = place[kind, sender, micro_batch]
            sent = ends[device][position]
            device, position = place[kind, receiver, micro_batch]
            # On the host, a receiver that was waiting got the message when it went on; otherwise the message arrived
            # when sent.
            waited = position == 0 or ends[device][position - 1] < sent
            there = max(sent, arrived.get(key, starts[device][position] if waited else sent))
            transfers.append(Transfer(kind, sender, receiver, micro_batch, sent, there, size))
        return tuple(sorted(transfers, key=attrgetter("start")))


class RecordedTransport:
    """A transport that notes for a recorder the messages that go from one device to another."""

    def __init__(self, inner: Transport, schedule: Schedule, recorder: Recorder) -> None:
        self._inner = inner
        self._device_of = schedule.device_of
        self._sent = recorder.sent
        self.recv = inner.recv

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Send the message, and record it if it leaves the device."""
        if self._device_of[sender] != self._device_of[receiver] and message is not None:
            self._sent.append((sender, receiver, key, bytes_of(message)))
        self._inner.send(sender, receiver, key, message)


class _Clock:
    """Takes start and end of each action of a device; used by the device's worker.

    A moment is a number of seconds on a CPU, and an event on the worker's current stream on an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        self.now: Callable[[], Any] = partial(_event, device) if has_streams(device) else _now

    def seconds(self, moment: Any) -> float:
        """Return the time of a moment on the host's clock; waits for the device."""
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        return self._first_seconds + self.starts[0].elapsed_time(moment) / 1e3

    @cached_property
    def _first_seconds(self) -> float:
        """Return the time of the first event, from another event that the host waits for."""
        self.starts[0].synchronize()
        stream = torch.Stream(device=self.device)  # a new stream is empty, so nothing delays the event
        seen = []
        for _ in range(_ANCHORS):
            before = _now()
            event = recorded(stream, timed=True)
            event.synchronize()
            after = _now()
            seen.append((after - before, (before + after) / 2, event))
        _, at, event = min(seen, key=lambda each: each[0])
        return at - self.starts[0].elapsed_time(event) / 1e3


def _event(device: torch.device) -> torch.Event:
    """Return an event after everything that is queued on the worker's stream."""
    return recorded(torch.accelerator.current_stream(device), timed=True)


def _carried(kind: Kind | int) -> Kind:
    """Return the kind of a message's content: a gradient, unless its key says otherwise."""
    return kind if kind is Kind.F or kind is Kind.REDUCE_GRAD else Kind.B


def _micro_batch(key: Key) -> int | None:
    return None if key[0] is Kind.REDUCE_GRAD else key[2]
