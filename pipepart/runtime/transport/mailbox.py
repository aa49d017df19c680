"""Messages between the workers of one step."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from schedules import Kind

Key = tuple[Kind | int, int, int]  # an action, or a shared parameter's number in place of its kind


class Stopped(Exception):
    """The step has failed on another device: whoever waits gives up."""


class Mailbox:
    """What one device receives in one step, each message under the action that needs it.

    Any thread puts; only the device's own worker takes. Messages may come in another order than they are taken:
    what comes early is laid aside.
    """

    __slots__ = ("_arrivals", "_early")

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[tuple[Key | None, Any]] = SimpleQueue()
        self._early: dict[Key, Any] = {}

    def put(self, key: Key, message: Any) -> None:
        """Sends a message to this device."""
        self._arrivals.put((key, message))

    def stop(self) -> None:
        """Wakes the device's worker, now and at any later wait, with :class:`Stopped`."""
        self._arrivals.put((None, None))

    def take(self, key: Key) -> Any:
        """The message for the action ``key``; waits for it.

        Raises:
            Stopped: the step has failed elsewhere.
        """
        if key in self._early:
            return self._early.pop(key)
        while True:
            arrived, message = self._arrivals.get()
            if arrived == key:
                return message
            if arrived is None:
                self._arrivals.put((None, None))
                raise Stopped
            self._early[arrived] = message
