"""Delivers messages into the memory of the receiving device, after the time that an emulated link takes.

A strict device has the copy of a message from the moment that it is sent, as an accelerator has. Live values that go
past stages, and gradients of replicas, stay with their sender until they are used.

::

    worker of speed 0.5     compute ── waits as long again ── send
    link                         sent ── after the message before it ─── bytes / bandwidth ── latency ── arrived
    receiving worker                                                                  sleeps until then ── compute

Waiting threads sleep, so that the core is free for the devices that compute. The arrival time travels with the message,
so that the sender goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..autograd.in_place import VersionCounter, check_counters, sent_counters
from ..autograd.sparse import bytes_of
from ..cluster import Link
from ..runtime.offload import Copy, CopyQueue
from ..runtime.transport.cuda import is_fetched
from ..runtime.transport.threads import Key, Transport
from .device import StrictDevice


class Clock(NamedTuple):
    """The time that emulated devices and links take; tests put their own in its place."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep

    def sleep_until(self, then: float) -> None:
        """Sleep until ``now()`` is ``then``."""
        seconds = then - self.now()
        if seconds > 0:
            self.sleep(seconds)


class StrictTransport:
    """Copies each message to the device that receives it when it is sent.

    A layer that writes into a message after that is refused as on devices without memories of their own: on
    accelerators the copy may still be on its way.

    Args:
        inner: carries the messages.
        device_of: the index of each stage's device.
        devices: the devices.
    """

    def __init__(self, inner: Transport, device_of: Sequence[int], devices: Sequence[StrictDevice]) -> None:
        self._inner = inner
        self._device_of = device_of
        self._devices = devices

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Send a message, on the worker of its sender."""
        here, there = self._device_of[sender], self._device_of[receiver]
        counters: Sequence[VersionCounter] = ()
        if here != there and not is_fetched(key):
            counters = sent_counters(message)
            message = self._devices[there].received(message)
        self._inner.send(sender, receiver, key, (message, counters))

    def recv(self, receiver: int, key: Key) -> Any:
        """Receive a message, on the worker of its receiver.

        Raises:
            RuntimeError: the message was overwritten after it had been sent.
        """
        message, counters = self._inner.recv(receiver, key)
        check_counters(counters)
        return message


class EmulatedTransport:
    """The messages of one run, each with the time of its arrival. A direction of a link carries one at a time.

    Args:
        inner: carries the messages.
        devices: the index of each stage's device.
        links: from each device to each other.
        clock: measures and sleeps.
        message_seconds: what a message between threads takes anyway.
    """

    def __init__(
        self,
        inner: Transport,
        devices: Sequence[int],
        links: Sequence[Sequence[Link]],
        clock: Clock,
        message_seconds: float,
    ) -> None:
        self._inner = inner
        self._devices = devices
        self._links = links
        self._clock = clock
        self._message_seconds = message_seconds
        self._free_at = [[0.0] * len(row) for row in links]

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Send a message from one stage to another, on the worker of the first."""
        here, there = self._devices[sender], self._devices[receiver]
        arrives = 0.0
        if here != there:
            link = self._links[here][there]
            departs = max(self._clock.now(), self._free_at[here][there])
            passed = departs + (bytes_of(message) / link.bandwidth if link.bandwidth else 0.0)
            self._free_at[here][there] = passed
            arrives = passed + max(0.0, link.latency - self._message_seconds)
        self._inner.send(sender, receiver, key, (message, arrives))

    def recv(self, receiver: int, key: Key) -> Any:
        """The message for an action of a stage, on the worker of that stage; waits for it."""
        message, arrives = self._inner.recv(receiver, key)
        self._clock.sleep_until(arrives)
        return message


class EmulatedHostLink(CopyQueue):
    """Copies on the device's worker, which sleeps until the link would have carried the copy.

    Args:
        bandwidth: of the link, bytes per second.
        clock: measures and sleeps.
    """

    def __init__(self, bandwidth: float, clock: Clock) -> None:
        self._bandwidth = bandwidth
        self._clock = clock
        self._free_at = 0.0

    def start_out(self, tensors: Sequence[Tensor]) -> Copy:
        return self._queued(super().start_out(tensors))

    def wait(self, copy: Copy) -> None:
        self._clock.sleep_until(copy.done_at)

    def start_back(self, tensors: Sequence[Tensor]) -> Copy:
        return self._queued(super().start_back(tensors))

    def _queued(self, copy: Copy) -> Copy:
        self._free_at = max(self._clock.now(), self._free_at) + _bytes_of(copy.tensors) / self._bandwidth
        copy.done_at = self._free_at
        return copy


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that :func:`own_copy` copies: of each storage the range that the tensors use."""
    ranges: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        first = tensor.data_ptr()
        end = first + (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
        key = tensor.untyped_storage()._cdata
        start, stop = ranges.get(key, (first, end))
        ranges[key] = min(first, start), max(end, stop)
    return sum(end - first for first, end in ranges.values())
