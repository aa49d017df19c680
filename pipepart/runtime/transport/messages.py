"""Carries the messages of one run from stage to stage, and from device to device."""

from __future__ import annotations

from typing import Any

import torch

from schedules import Schedule

from .cuda import Streams
from .mailbox import Key, Mailbox


class Post:
    """A mailbox for each device. Whoever sends has made the message on its own device; whoever takes uses it there.

    Args:
        schedule: has the stages.
        streams: of the workers, which send and receive messages in their order; None where the host's is all there is.
        arrivals: takes for each message that streams carry the event of its arrival, with its time.
    """

    def __init__(
        self,
        schedule: Schedule,
        streams: Streams | None = None,
        arrivals: dict[Key, torch.Event] | None = None,
    ) -> None:
        self._mailboxes = [Mailbox() for _ in schedule.actions]
        self._mailbox_of = [self._mailboxes[device] for device in schedule.device_of]
        self._worker_of = schedule.device_of
        self._streams = streams
        self._arrivals = arrivals

    def put(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Sends a message from one stage to another, on the worker of the first."""
        if self._streams is not None:
            there = self._worker_of[receiver]
            timed = self._arrivals is not None
            message = self._streams.send(self._worker_of[sender], there, message, timed)
            if self._arrivals is not None and message.arrived is not None:
                self._arrivals[key] = message.arrived
        self._mailbox_of[receiver].put(key, message)

    def take(self, receiver: int, key: Key) -> Any:
        """The message for an action of a stage, on the worker of that stage; waits for it.

        Raises:
            Stopped: the run has failed elsewhere.
        """
        message = self._mailbox_of[receiver].take(key)
        if self._streams is not None:
            message = self._streams.receive(self._worker_of[receiver], message)
        return message

    def stop(self) -> None:
        """Wakes whoever waits, now or later."""
        for mailbox in self._mailboxes:
            mailbox.stop()

    def forget(self) -> None:
        """Lets go of what was not taken."""
        self._mailboxes.clear()
        self._mailbox_of.clear()
