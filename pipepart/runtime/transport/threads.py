"""Carries messages between the stages of one step, through one mailbox per device.

A worker *sends* what a stage has made for another stage, and *receives* what a stage needs, waiting for it. A message
is keyed by the action that receives it. CUDA copies, emulated links and tracing are further transports around this one.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Any, Protocol

from schedules import Kind, Schedule

# (kind, stage, micro-batch) of that action. The gradient of a shared parameter has the parameter's number for a kind.
# A message that goes past stages, or from another replica, also has the number of the stage that sends it.
Key = tuple[Kind | int, int, int] | tuple[Kind | int, int, int, int]

_MISSING = object()


def sender_of(key: Key) -> int:
    """Return the stage that sends a message which is not the gradient of a shared parameter."""
    if len(key) == 4:
        return key[3]
    return {Kind.F: key[1] - 1, Kind.B: key[1] + 1}.get(key[0], key[1])  # type: ignore[call-overload]


class Stopped(Exception):
    """The step has failed on another device, so no message will come."""


class Transport(Protocol):
    """Carries the messages of one step. Stages are numbered as in its schedule."""

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Send a message from one stage to another. Called on the worker of ``sender``; does not wait."""
        ...

    def recv(self, receiver: int, key: Key) -> Any:
        """Wait for the message ``key`` and return it. Called on the worker of ``receiver``.

        Raises:
            Stopped: the step has failed elsewhere.
        """
        ...


class ThreadTransport:
    """The mailboxes of the devices of one step, between worker threads of one process.

    Any thread may send a message; only the device's worker receives. A message that arrives before it is requested is
    stored.

    Args:
        schedule: says which device runs which stage.

    Attributes:
        awaiting: for each device the key of the message that its worker waits for.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.awaiting: list[Key | None] = [None for _ in schedule.actions]
        self._device_of = schedule.device_of
        self._arrivals: list[SimpleQueue[tuple[Key | None, Any]]] = [SimpleQueue() for _ in schedule.actions]
        self._arrivals_of = [self._arrivals[device] for device in schedule.device_of]
        self._stored: list[dict[Key, Any]] = [{} for _ in schedule.actions]

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Put the message into the mailbox of the receiver's device."""
        self._arrivals_of[receiver].put((key, message))

    def recv(self, receiver: int, key: Key) -> Any:
        """Wait for the message ``key`` and return it.

        Raises:
            Stopped: the step has failed elsewhere.
        """
        device = self._device_of[receiver]
        stored = self._stored[device]
        if stored and (message := stored.pop(key, _MISSING)) is not _MISSING:
            return message
        arrivals = self._arrivals[device]
        self.awaiting[device] = key
        while True:
            arrived, message = arrivals.get()
            if arrived == key:
                self.awaiting[device] = None
                return message
            if arrived is None:
                arrivals.put((None, None))
                raise Stopped
            stored[arrived] = message

    def stop(self) -> None:
        """Wake every worker that waits now or later with :class:`Stopped`, and drop all messages."""
        for arrivals, stored in zip(self._arrivals, self._stored, strict=True):
            stored.clear()
            try:
                while True:
                    arrivals.get_nowait()
            except Empty:
                arrivals.put((None, None))
