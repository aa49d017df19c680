"""Streams of accelerators: all waits of this package for streams, and all holds of memory for streams.

Every wait and every hold of the package goes through :data:`waits`, under a name. Tests leave out one at a time on
simulated devices, to see that an access to memory has no order without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

import torch
from torch import Tensor

from ..autograd.sparse import record_stream

_WITHOUT_STREAMS = frozenset({"meta", "mps"})  # where all there is runs in one order


class Wait(Enum):
    """Names of the places in the code where a stream or the host waits for a stream, or memory is held for one."""

    STEP_BEHIND_CALLER = auto()  # what workers queue, for what the caller has queued before the step
    CALLER_BEHIND_STEP = auto()  # what the caller queues behind the step, for the workers
    ORDER_OF_GRADIENTS = auto()  # a backward that autograd calls, and what autograd does with its gradients
    HELD_FOR_CALLER = auto()  # outputs, and what the loss is put together from
    COPY_BEHIND_COMPUTE = auto()  # the copy of a message, for what makes it
    HELD_FOR_COPY = auto()  # the message at the sender
    FETCH_BEHIND_COMPUTE = auto()  # the same two where the receiver copies the message
    HELD_FOR_FETCH = auto()
    COMPUTE_BEHIND_COPY = auto()  # what reads the message at the receiver
    HOST_BEHIND_COPY = auto()  # the same where the receiver is the CPU
    HELD_FOR_COMPUTE = auto()  # the message at the receiver
    HOST_BEHIND_PINNED = auto()  # the return of a step, for copies of the caller's pinned tensors
    CALLER_BEHIND_PINNED = auto()  # the step, for these copies
    HELD_FOR_STEP = auto()  # these copies
    PACE = auto()  # the host, so that it is not too far ahead of its device
    OFFLOAD_BEHIND_COMPUTE = auto()  # the copy of a stash to the host, for what makes the stash
    COMPUTE_BEHIND_OFFLOAD = auto()  # what takes over the memory of the stash
    RELOAD_BEHIND_COMPUTE = auto()  # the copy back, for what used its memory before
    COMPUTE_BEHIND_RELOAD = auto()  # the backward, for the copy back


class Waits:
    """Makes streams wait and holds memory; ``left_out`` is for tests."""

    def __init__(self) -> None:
        self.left_out: frozenset[Wait] = frozenset()

    def wait(self, place: Wait, stream: torch.Stream, event: torch.Event) -> None:
        """Make everything that is queued on a stream from now on wait for an event."""
        if place not in self.left_out:
            stream.wait_event(event)

    def host_wait(self, place: Wait, event: torch.Event | torch.cuda.Event) -> None:
        """Wait for an event on the calling thread."""
        if place not in self.left_out:
            event.synchronize()

    def hold(self, place: Wait, tensor: Tensor, stream: torch.Stream) -> None:
        """Keep the tensor's memory from reuse until all work queued on the stream so far has ended."""
        if place not in self.left_out:
            record_stream(tensor, stream)


waits = Waits()


def hold_for_caller(tensors: Iterable[Tensor]) -> None:
    """Hold tensors made by workers for the current streams of the calling thread, which uses them from now on."""
    for tensor in tensors:
        if has_streams(tensor.device):
            waits.hold(Wait.HELD_FOR_CALLER, tensor, torch.accelerator.current_stream(tensor.device))


def order_gradients(homes: Iterable[torch.device], devices: Iterable[torch.device]) -> None:
    """Make the current streams of ``devices`` wait for those of ``homes``, where gradients are.

    Autograd orders the gradients that a node takes and returns by one stream only, that of the node. Which of the
    devices that stream is on is not known here.
    """
    for home in filter(has_streams, dict.fromkeys(homes)):
        ready = torch.accelerator.current_stream(home).record_event()
        for device in devices:
            if device != home and has_streams(device):
                stream = torch.accelerator.current_stream(device)
                waits.wait(Wait.ORDER_OF_GRADIENTS, stream, ready)


@contextmanager
def on_streams(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Set the current streams of the calling thread; the device of the last stream becomes the current device.

    A stream itself is a block of this sort, but for one thread at a time.
    """
    index = torch.accelerator.current_device_index()
    before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    try:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        yield
    finally:
        for stream in before:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(index)


def recorded(stream: torch.Stream, timed: bool = False) -> torch.Event:
    """Record an event after everything queued on a stream; it records the time if ``timed``."""
    event = torch.Event(device=stream.device, enable_timing=timed)
    event.record(stream)
    return event


def sleeping_event(stream: torch.Stream) -> torch.Event | torch.cuda.Event:
    """Return an event after everything queued on a stream; the host sleeps while it waits for this event.

    ``torch.Event`` ignores its ``blocking``, and CUDA has the host spin for events without it.
    """
    if stream.device.type != "cuda":
        return recorded(stream)
    event = torch.cuda.Event(blocking=True)
    event.record(
        torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
    )
    return event


def has_streams(device: torch.device) -> bool:
    """Return True if a device runs asynchronously to the host, on streams."""
    return device.type != "cpu" and device.type not in _WITHOUT_STREAMS
