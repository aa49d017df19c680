"""An exchange: each rank gives a short value, and gets those of all, by the hub."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from .hub import Channel

Done = SimpleQueue[BaseException | None]  # gets None at the end of what is waited for, or why it failed


class Exchange:
    """The exchanges of the ranks of a pipeline, one after another.

    ::

        rank 1 ──part──▶
                         rank 0 ──all──▶ every rank
        rank 2 ──part──▶

    Attributes:
        found: what the ranks gave to the last exchange that has ended, by rank.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.found: list[Any] = []
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._given: dict[int, Any] = {}  # to rank 0, by rank
        self._channel: Channel
        self._done: Done

    def begin(self, channel: Channel, mine: Any, done: Done) -> None:
        """Give this rank's value; ``done`` gets None when those of all are there."""
        self._channel, self._done = channel, done
        if self._rank == 0:
            self.give(0, mine)
        else:
            channel.send({"kind": "part", "value": mine, "to": 0})

    def give(self, rank: int, value: Any) -> None:
        """On rank 0: take what a rank gives, perhaps before this rank begins; the last of all ends the exchange."""
        with self._lock:
            self._given[rank] = value
            if len(self._given) < self._size:
                return
            found = [self._given[one] for one in range(self._size)]
            self._given = {}
        self._channel.send({"kind": "all", "values": found})
        self.end(found)

    def end(self, values: list[Any]) -> None:
        """The values of all ranks are there."""
        self.found = values
        self._done.put(None)
