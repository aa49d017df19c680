"""Virtual devices that are as slow as they are said to be, and links that take the time of real ones.

::

    worker of speed 0.5     compute ══ waits as long again ── send
    link                         sent ── behind the one before it ── bytes / bandwidth ── latency ── arrived
    worker behind it                                                           waits until then ── compute

Nobody waits by spinning: the core is free for the devices that compute meanwhile. The time of arrival travels with the
message, so that its sender goes on. Numbers do not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from schedules import Schedule

from ..autograd.sparse import bytes_of
from ..cluster import VIRTUAL_LATENCY_SECONDS, Link
from ..planning import Plan
from .conditions import Compute, Condition
from .transport.base import ForwardingTransport, Key, Transport

Clock = Callable[[], float]
Sleep = Callable[[float], object]


class Emulated(Condition):
    """The speeds and links of a plan's cluster.

    Args:
        plan: has them.
        clock, sleep: of the host.
    """

    def __init__(self, plan: Plan, clock: Clock = time.perf_counter, sleep: Sleep = time.sleep) -> None:
        names = [device.name for device in plan.workers]
        homes = plan.build_schedule().device_of
        self._speeds = [plan.workers[home].speed for home in homes]
        self._links = [[plan.cluster.link_between(one, other) for other in names] for one in names]
        self._clock = clock
        self._sleep = sleep

    def computing(self, compute: Compute) -> Compute:
        """It takes as long as on a device of the stage's speed."""

        def slowed(actions: Any, stage: int, micro_batch: int, given: Any) -> Any:
            start = self._clock()
            made = compute(actions, stage, micro_batch, given)
            now = self._clock()
            _sleep_until(start + (now - start) / self._speeds[stage], now, self._sleep)
            return made

        return slowed

    def transport(self, inner: Transport, schedule: Schedule) -> Transport:
        """Messages arrive when the links let them."""
        return _EmulatedTransport(inner, schedule, self._links, self._clock, self._sleep)


class _OnItsWay(NamedTuple):
    message: Any
    arrives: float


class _EmulatedTransport(ForwardingTransport):
    """Messages of one run. A direction of a link is used by the worker that sends along it, and by no other."""

    def __init__(
        self,
        inner: Transport,
        schedule: Schedule,
        links: Sequence[Sequence[Link]],
        clock: Clock,
        sleep: Sleep,
    ) -> None:
        super().__init__(inner)
        self._home = schedule.device_of
        self._links = links
        self._clock = clock
        self._sleep = sleep
        self._free = [[0.0] * len(links) for _ in links]

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Sends the message off with the time when it will be there."""
        here, there = self._home[sender], self._home[receiver]
        if here != there:
            link = self._links[here][there]
            departs = max(self._clock(), self._free[here][there])
            passed = departs + (bytes_of(message) / link.bandwidth if link.bandwidth else 0.0)
            self._free[here][there] = passed
            # A message between threads takes that much by itself.
            message = _OnItsWay(message, passed + max(0.0, link.latency - VIRTUAL_LATENCY_SECONDS))
        super().send(sender, receiver, key, message)

    def recv(self, receiver: int, key: Key) -> Any:
        """The message, when it has arrived."""
        found = super().recv(receiver, key)
        if not isinstance(found, _OnItsWay):
            return found
        _sleep_until(found.arrives, self._clock(), self._sleep)
        return found.message


def _sleep_until(then: float, now: float, sleep: Sleep) -> None:
    if then > now:
        sleep(then - now)
