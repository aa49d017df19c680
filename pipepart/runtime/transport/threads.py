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

    Args:
        schedule: says which device runs which stage.
    """

    def __init__(self, schedule: Schedule) -> None:
        mailboxes = [_Mailbox() for _ in schedule.actions]
        self._mailbox_of = [mailboxes[device] for device in schedule.device_of]

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Put the message into the mailbox of the receiver's device."""
        self._mailbox_of[receiver].put(key, message)

    def recv(self, receiver: int, key: Key) -> Any:
        """Wait for the message ``key`` and return it.

        Raises:
            Stopped: the step has failed elsewhere.
        """
        return self._mailbox_of[receiver].take(key)

    def stop(self) -> None:
        """Wake every worker that waits now or later with :class:`Stopped`, and drop all messages."""
        for mailbox in self._mailbox_of:
            mailbox.stop()


class _Mailbox:
    """The messages that one device receives in one step.

    Any thread may put a message; only the device's worker takes them. A message that arrives before it is requested is
    stored.
    """

    __slots__ = ("_arrivals", "_stored")

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[tuple[Key | None, Any]] = SimpleQueue()
        self._stored: dict[Key, Any] = {}

    def put(self, key: Key, message: Any) -> None:
        self._arrivals.put((key, message))

    def take(self, key: Key) -> Any:
        message = self._stored.pop(key, _MISSING)
        if message is not _MISSING:
            return message
        while True:
            arrived, message = self._arrivals.get()
            if arrived == key:
                return message
            if arrived is None:
                self._arrivals.put((None, None))
                raise Stopped
            self._stored[arrived] = message

    def stop(self) -> None:
        self._stored.clear()
        try:
            while True:
                self._arrivals.get_nowait()
        except Empty:
            self._arrivals.put((None, None))
