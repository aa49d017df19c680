"""Streams of a pipeline's workers on accelerators, and copies of messages between the devices.

A device goes through each of its streams in order, behind the host, which only queues. A worker computes on a stream of
its device: on the caller's current stream if no other worker has this device, so that activations, weights and
optimizers share one pool of memory; else on a stream of its own. On every other accelerator a worker has a stream for
what it does there beside computing, such as receiving the copies that it sends, and for each of them another one on its
own device that copies go out on. A message from one worker to another, as its owners hold it::

    compute of sender      departure            stream of sender there      compute of receiver
    ─────────────────      ─────────            ──────────────────────      ───────────────────
    F(s, k): makes y
    event (1) ───────────▶ wait for it
    y held for (2) ······· copies y ──────────▶ y', its memory from here
                                                event (3) ────────────────▶ wait for it
    y may be freed                              y' held for (4) ··········· F(s+1, k): reads y'

``send`` queues everything on the left and does not wait; ``receive`` does (3) and (4). When the last tensor over some
memory is deleted, the allocator returns the memory to its stream immediately, although other streams may still have to
read it. "Held for" means ``record_stream``, which keeps the memory until that stream has passed. On one device there is
no copy: the receiver waits for (1), and y is held for it. Messages within one worker, as between its chunks, need no
events: they are in the order of its compute stream.

A live value that goes past stages is fetched by its receiver instead, when that queues its forward. Until then it waits
in the memory of the sender, whose stage mostly keeps it for its backward anyway. Likewise the first replica fetches the
gradients of the others when its own are complete. The picture is the same, with streams of the receiver in the middle.

At the start of a step all of these streams wait for the caller's streams, and at its end the caller's streams wait for
them. So caller and pipeline may use and free each other's tensors, and the host never waits for a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from schedules import Kind, Schedule

from ...autograd import graph_cut
from ...autograd.own_copy import tensors
from ...workers.streams import Wait, has_streams, on_streams, recorded, sleeping_event, waits
from .threads import Key, Transport

Callers = Mapping[torch.device, torch.Stream]  # the caller's current streams, one an accelerator

# Actions that a worker queues before it waits for the device. Enough that the device never runs out of work while the
# host takes a message from a mailbox; few enough that memory held for a stream is freed early.
_AHEAD = 4


class InFlight(NamedTuple):
    """A message that is being copied: it is on the receiver's device once the event has passed; None means now."""

    message: Any
    arrived: torch.Event | None


class Waiting(NamedTuple):
    """A message on its sender's device, for the receiver to fetch once the event has passed; None means now."""

    message: Any
    made: torch.Event | None


class Streams:
    """The streams of all workers of a pipeline.

    A method that names a worker is called by it; ``begin`` and ``end`` are called by the caller of a step.

    Args:
        homes: the device of each worker, accelerators with their index.
        local: the workers of this process, which has streams on their devices only; None for all.
    """

    def __init__(self, homes: Sequence[torch.device], local: Sequence[int] | None = None) -> None:
        self._homes = list(homes)
        self.local = range(len(homes)) if local is None else local
        devices = [homes[worker] for worker in self.local]
        self._devices = [home for home in dict.fromkeys(devices) if has_streams(home)]
        alone = {home for home in self._devices if devices.count(home) == 1}
        self._own: list[dict[torch.device, torch.Stream]] = [{} for _ in homes]
        for worker in self.local:
            home = homes[worker]
            self._own[worker] = {
                device: torch.Stream(device)
                for device in self._devices
                if device != home or home not in alone
            }
        self._callers: Callers = {}
        self._departures: list[dict[torch.device, torch.Stream]] = [{} for _ in homes]
        self._arrivals: list[torch.Stream | None] = [None for _ in homes]
        self._host_copies: dict[int, torch.Stream] = {}  # by worker

    @classmethod
    def of(cls, homes: Sequence[torch.device], local: Sequence[int]) -> Streams | None:
        """Return the streams of a process's workers; None if no device of them has streams."""
        return cls(homes, local) if any(has_streams(homes[worker]) for worker in local) else None

    def callers(self) -> Callers:
        """Return the streams that the calling thread is on, of each device."""
        return {device: torch.accelerator.current_stream(device) for device in self._devices}

    def begin(self, callers: Callers) -> None:
        """Make the workers' streams wait for the work that the caller has queued: weights, inputs, freed memory.

        Inputs and targets need not be held for workers: the step has them until ``end``. Within another backward, the
        calling thread is on streams of a worker, where autograd may have queued gradients of outputs.
        """
        self._callers = callers
        now = self.callers()
        for device, caller in callers.items():
            if now[device] != caller:
                waits.wait(Wait.STEP_BEHIND_CALLER, caller, now[device].record_event())
            others = [streams[device] for streams in self._own if device in streams]
            if others:
                queued = caller.record_event()
                for stream in others:
                    waits.wait(Wait.STEP_BEHIND_CALLER, stream, queued)

    def end(self, callers: Callers) -> None:
        """Make the caller's streams wait for the work that the workers have queued."""
        for device, caller in callers.items():
            used = [streams[device] for streams in self._own if device in streams]
            copying = [stream for stream in self._host_copies.values() if stream.device == device]
            for stream in (*used, *copying, self._callers[device]):
                if stream != caller:
                    waits.wait(Wait.CALLER_BEHIND_STEP, caller, stream.record_event())

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Let a step begin and end within the block, in the midst of another one."""
        before = self._callers
        try:
            yield
        finally:
            self._callers = before

    @contextmanager
    def entered(self, worker: int) -> Iterator[None]:
        """Put the calling thread on the worker's streams, and on its device, within the block."""
        home = self._homes[worker]
        streams = list(self._own[worker].values())
        if has_streams(home) and home not in self._own[worker]:
            streams.append(self._callers[home])
        with on_streams(streams):
            if has_streams(home):
                torch.accelerator.set_device_index(home)
            yield

    def pace(self, worker: int) -> Pace | None:
        """Return the pace of a worker on an accelerator; None on a CPU."""
        compute = self._compute(worker)
        return None if compute is None else Pace(compute)

    def of_host_copies(self, worker: int) -> torch.Stream:
        """Return the stream on the worker's device that its copies to and from the host go out on."""
        if worker not in self._host_copies:
            self._host_copies[worker] = torch.Stream(self._homes[worker])
        return self._host_copies[worker]

    def send(self, sender: int, receiver: int, message: Any, timed: bool = False) -> InFlight:
        """Queue the copy of a message to the receiver's device, if it is another; ``timed`` events record the time."""
        moved = () if sender == receiver else tensors(message)
        if not moved:
            return InFlight(message, None)
        here, there = self._homes[sender], self._homes[receiver]
        compute = self._compute(sender)
        if here == there:
            return InFlight(message, None if compute is None else recorded(compute, timed))  # (1)
        if compute is None:
            copied = graph_cut.move(message, there, wait=False)
            return InFlight(copied, recorded(self._own[sender][there], timed))
        departure = self._departure(sender, there)
        waits.wait(Wait.COPY_BEHIND_COMPUTE, departure, compute.record_event())  # (1)
        torch.accelerator.set_stream(departure)
        try:
            copied = graph_cut.move(message, there, wait=False)
        finally:
            torch.accelerator.set_stream(compute)
        for tensor in moved:
            if tensor.device == here:
                waits.hold(Wait.HELD_FOR_COPY, tensor, departure)  # (2)
        return InFlight(copied, recorded(self._own[sender].get(there, departure), timed))  # (3)

    def keep(self, sender: int, message: Any) -> Waiting:
        """Return a message that its receiver fetches."""
        compute = self._compute(sender)
        return Waiting(message, None if compute is None else recorded(compute))

    def fetch(self, sender: int, receiver: int, waiting: Waiting, timed: bool = False) -> InFlight:
        """Queue the copy of a message to the receiver's device; called by the receiver."""
        here, there = self._homes[sender], self._homes[receiver]
        moved = tensors(waiting.message)
        if here == there or not moved:
            return InFlight(waiting.message, waiting.made)
        compute, source = self._compute(receiver), self._own[receiver].get(here)
        if source is not None and waiting.made is not None:
            waits.wait(Wait.FETCH_BEHIND_COMPUTE, source, waiting.made)  # (1)
        arrival = None
        if compute is None:
            copied = graph_cut.move(waiting.message, there, wait=False)
        else:
            arrival = self._arrivals[receiver] = self._arrivals[receiver] or torch.Stream(there)
            torch.accelerator.set_stream(arrival)
            try:
                copied = graph_cut.move(waiting.message, there, wait=False)
            finally:
                torch.accelerator.set_stream(compute)
        for tensor in moved:
            if source is not None and tensor.device == here:
                waits.hold(Wait.HELD_FOR_FETCH, tensor, source)  # (2)
        queued_on = arrival or source
        return InFlight(copied, None if queued_on is None else recorded(queued_on, timed))  # (3)

    def receive(self, receiver: int, in_flight: InFlight) -> Any:
        """Return the message for the receiver's compute stream; the host waits for one that is for the CPU."""
        message, arrived = in_flight
        if arrived is None:
            return message
        compute = self._compute(receiver)
        if compute is None:
            waits.host_wait(Wait.HOST_BEHIND_COPY, arrived)
            return message
        waits.wait(Wait.COMPUTE_BEHIND_COPY, compute, arrived)  # (3)
        for tensor in tensors(message):
            if tensor.device == self._homes[receiver]:
                waits.hold(Wait.HELD_FOR_COMPUTE, tensor, compute)  # (4)
        return message

    def _compute(self, worker: int) -> torch.Stream | None:
        home = self._homes[worker]
        return self._own[worker].get(home) or self._callers.get(home)

    def _departure(self, worker: int, there: torch.device) -> torch.Stream:
        """Return the stream on the worker's own device that copies to another device go out on."""
        stream = self._departures[worker].get(there)
        if stream is None:
            stream = self._departures[worker][there] = torch.Stream(self._homes[worker])
        return stream


class Pace:
    """Keeps the host from queuing far more actions than a device has finished.

    Before it queues an action, the host waits for an action a few places earlier. The device always has those few
    actions to run, so only the host waits.
    """

    def __init__(self, compute: torch.Stream) -> None:
        self._compute = compute
        self._queued: deque[torch.Event | torch.cuda.Event] = deque()

    def wait(self) -> None:
        if len(self._queued) == _AHEAD:
            waits.host_wait(Wait.PACE, self._queued.popleft())

    def queued(self) -> None:
        self._queued.append(sleeping_event(self._compute))


class StreamTransport:
    """Copies messages between accelerators on the streams of their workers.

    Args:
        inner: carries what describes a copy that is on its way, from host thread to host thread.
        arrivals: takes, for each message that streams carry, a timed event of its arrival; None to time nothing.
    """

    def __init__(
        self,
        inner: Transport,
        schedule: Schedule,
        streams: Streams,
        arrivals: dict[Key, torch.Event] | None = None,
    ) -> None:
        self._inner = inner
        self._worker_of = schedule.device_of
        self._streams = streams
        self._arrivals = arrivals

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        arrivals = self._arrivals
        here, there = self._worker_of[sender], self._worker_of[receiver]
        if is_fetched(key):
            self._inner.send(sender, receiver, key, self._streams.keep(here, message))
            return
        in_flight = self._streams.send(here, there, message, timed=arrivals is not None)
        if arrivals is not None and in_flight.arrived is not None:
            arrivals[key] = in_flight.arrived
        self._inner.send(sender, receiver, key, in_flight)

    def recv(self, receiver: int, key: Key) -> Any:
        worker, message = self._worker_of[receiver], self._inner.recv(receiver, key)
        if isinstance(message, Waiting):
            sender = key[-1]
            assert isinstance(sender, int)
            message = self._streams.fetch(
                self._worker_of[sender], worker, message, timed=self._arrivals is not None
            )
            if self._arrivals is not None and message.arrived is not None:
                self._arrivals[key] = message.arrived
        return self._streams.receive(worker, message)


def is_fetched(key: Key) -> bool:
    """Return True for what its receiver fetches: gradients of replicas, and live values that go past stages.

    The gradient of such a value is sent as other messages are.
    """
    return key[0] is Kind.REDUCE_GRAD or (len(key) == 4 and key[0] is Kind.F)
