"""Delivers messages when an emulated link would, and copies them to the memory of a strict device.

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

from ...autograd.in_place import check_not_overwritten
from ...autograd.sparse import bytes_of
from ...cluster import VIRTUAL_LATENCY_SECONDS, Link
from ..transport.base import ForwardingTransport, Key, Transport
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


class InFlight(NamedTuple):
    """A message and the time of its arrival."""

    message: Any
    arrives: float


class EmulatedTransport(ForwardingTransport):
    """The messages of one run. Each direction of a link carries one message at a time.

    Args:
        inner: carries the messages.
        devices: the index of each stage's device.
        links: from each device to each other; None where messages take no emulated time.
        strict: the devices, whose memory messages are copied to; None to hand messages on as they are.
        clock: measures and sleeps.
    """

    def __init__(
        self,
        inner: Transport,
        devices: Sequence[int],
        links: Sequence[Sequence[Link]] | None,
        strict: Sequence[StrictDevice] | None,
        clock: Clock,
    ) -> None:
        super().__init__(inner)
        self._devices = devices
        self._links = links
        self._strict = strict
        self._clock = clock
        self._free_at = [[0.0] * len(row) for row in links or ()]

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Send a message from one stage to another, on the worker of the first."""
        here, there = self._devices[sender], self._devices[receiver]
        if self._links is not None and here != there:
            link = self._links[here][there]
            departs = max(self._clock.now(), self._free_at[here][there])
            passed = departs + (bytes_of(message) / link.bandwidth if link.bandwidth else 0.0)
            self._free_at[here][there] = passed
            # Threads need VIRTUAL_LATENCY_SECONDS for a message anyway.
            message = InFlight(message, passed + max(0.0, link.latency - VIRTUAL_LATENCY_SECONDS))
        super().send(sender, receiver, key, message)

    def recv(self, receiver: int, key: Key) -> Any:
        """The message for an action of a stage, on the worker of that stage; waits for it."""
        message = super().recv(receiver, key)
        if isinstance(message, InFlight):
            self._clock.sleep_until(message.arrives)
            message = message.message
        if self._strict is None:
            return message
        check_not_overwritten(message)
        return self._strict[self._devices[receiver]].bring(message)
