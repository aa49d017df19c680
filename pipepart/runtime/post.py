"""Carries the messages of one run from stage to stage."""

from __future__ import annotations

from typing import Any

from schedules import Schedule

from .mailbox import Key, Mailbox


class Post:
    """A mailbox for each device. Whoever sends has made the message on its own device; whoever takes uses it there."""

    def __init__(self, schedule: Schedule) -> None:
        self._mailboxes = [Mailbox() for _ in schedule.actions]
        self._mailbox_of = [self._mailboxes[device] for device in schedule.device_of]

    def put(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Sends a message from one stage to another, on the worker of the first."""
        self._mailbox_of[receiver].put(key, message)

    def take(self, receiver: int, key: Key) -> Any:
        """The message for an action of a stage, on the worker of that stage; waits for it.

        Raises:
            Stopped: the run has failed elsewhere.
        """
        return self._mailbox_of[receiver].take(key)

    def stop(self) -> None:
        """Wakes whoever waits, now or later."""
        for mailbox in self._mailboxes:
            mailbox.stop()

    def forget(self) -> None:
        """Lets go of what was not taken."""
        self._mailboxes.clear()
        self._mailbox_of.clear()
