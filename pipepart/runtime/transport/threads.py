"""Carries messages between worker threads of one process, through one mailbox per device."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Any

from schedules import Schedule

from .base import Key, Stopped

_MISSING = object()


class ThreadTransport:
    """Mailboxes for the devices of one step.

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
        """Wake every worker that waits now or later, and drop all messages."""
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
