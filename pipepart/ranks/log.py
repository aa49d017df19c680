"""MessageLog: short messages between all processes of a job, in one global order, in torch.distributed's store.

::

    store      0: {"kind": "failure", "from": 1, ...}   1: {"kind": "lost", "rank": 2, ...}   2: ...
    rank 0 ─── reads 0 ─────────────────────────────── reads 1 ──────────────────────────── waits for 2
    rank 1 ─── reads 0 ───────── waits for 1

Each process reads all messages, on a thread and a connection of its own. To write one is to set the first free number,
in one operation of the store: a process that is killed leaves no gap. The store is that of torchrun, or on rank 0: if
it is gone, rank 0 counts as lost.

A process has one log from its first pipeline to its end. Each pipeline has a channel of it.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from .start import agree_on_start, is_store_of
from .waiting import waits_in_torch
from .watch import PeerWatch

_LEAVE_SECONDS = 1.0  # for the others to report before a launcher ends them, or the store ends with this rank
_LONGEST = timedelta(days=30)

Message = dict[str, Any]
Deliver = Callable[[Message], None]


class MessageLog:
    """The messages of a job, as read by one process. All processes create it at the same point.

    Args:
        rank, size: of this process, and the number of processes.
        store: that all processes have.
        seconds: to wait for the other ranks, as in :func:`agree_on_start`.

    Attributes:
        store: for this start of the job only.
        gone: the last message of each rank whose process has ended.
    """

    def __init__(self, rank: int, size: int, store: Any, seconds: float) -> None:
        self.rank, self.size = rank, size
        self.gone: dict[int, Message] = {}
        self._lock = threading.RLock()  # the handler of a signal may close a pipeline
        self._channels: dict[int, Channel] = {}
        self._opened = 0
        self._early: list[Message] = []  # for channels that are not open here yet
        self._ids = itertools.count()
        self._next = 0  # the first message that is not read
        self.store = agree_on_start(rank, size, store, seconds)
        self._must_stay = is_store_of(rank)
        self._process = os.getpid()
        self._writer, self._reader = self.store.clone(), self.store.clone()
        self._reader.set_timeout(_LONGEST)
        # A lost rank may have said before that it ends: then that counts.
        self._watch = PeerWatch(
            self.store, rank, size, seconds, lambda lost: self.send({"kind": "lost", "rank": lost})
        )
        threading.Thread(target=self._listen, name="pipepart-messages", daemon=True).start()

    def open(self, deliver: Deliver) -> Channel:
        """Return the next channel. All ranks open their channels in the same order.

        Args:
            deliver: called on the log's thread with each message of the channel from another rank, with the end of
                exchanges ``{"kind": "all", "number": n, "values": [...]}``, and with ``{"kind": "lost", "rank": k}`` or
                ``{"kind": "closed", "rank": k, "calls": n, "why": ...}`` for a rank whose process is lost or whose
                script has ended.
        """
        with self._lock:
            channel = Channel(self, self._opened, deliver)
            self._channels[channel.number] = channel
            self._opened += 1
            early = [message for message in self._early if message["channel"] == channel.number]
            self._early = [message for message in self._early if message["channel"] != channel.number]
            for message in early:
                deliver(message)
            for departure in self.gone.values():
                deliver(_of_channel(departure, channel.number))
        return channel

    def forget(self, channel: Channel) -> None:
        """Stop delivering messages to a channel."""
        with self._lock:
            self._channels.pop(channel.number, None)

    def end(self, reason: Message, wait: bool) -> None:
        """Tell the other ranks that this script has ended, and why; ``wait`` a second for them to report it."""
        if os.getpid() != self._process:
            return  # a fork, whose end is not that of the rank
        calls = {str(number): channel.calls for number, channel in self._channels.items()}
        self.send({"kind": "ended", "rank": self.rank, "calls": calls, **reason})
        limit = time.monotonic() + (_LEAVE_SECONDS if wait or self._must_stay else 0.0)
        while len(self.gone) < self.size - 1 and time.monotonic() < limit:
            time.sleep(0.01)
        self._watch.end()

    def send(self, message: Message) -> None:
        """Send a message to all ranks."""
        entry = json.dumps({**message, "from": self.rank, "id": next(self._ids)}).encode()
        with self._lock, suppress(RuntimeError):  # the store is gone, which the reader tells
            number = self._next
            while self._writer.compare_set(str(number), "", entry) != entry:
                number += 1

    def exchange(self, channel: int, number: int, value: Any) -> None:
        """Add this rank's value to an exchange. The rank that adds the last value sends all values to all ranks.

        Values have the keys of those of the exchange before the last one, which all ranks have read by now.
        """
        keys = [f"{channel}/{number % 2}/{rank}" for rank in range(self.size)]
        with self._lock, suppress(RuntimeError):  # as above
            self._writer.set(keys[self.rank], json.dumps((self._next, value)))
            if self._writer.add(f"{channel}/given", 1) % self.size == 0:
                read, values = zip(*map(json.loads, self._writer.multi_get(keys)), strict=True)
                message = {"kind": "all", "channel": channel, "number": number, "values": values}
                self.send({**message, "read": min(read)})  # number that all ranks have read up to

    def _listen(self) -> None:
        """Read messages until this script ends; runs on the log's thread."""
        deleted = 0  # messages before this number
        with waits_in_torch():
            while True:
                try:
                    message = json.loads(self._reader.get(str(self._next)))
                except RuntimeError:  # the store is gone
                    self._arrived({"kind": "lost", "rank": 0, "from": 0})
                    return
                self._next += 1
                if message["kind"] == "ended" and message["from"] == self.rank:
                    return
                if message["from"] != self.rank or message["kind"] in ("all", "lost"):
                    self._arrived(message)
                if self.rank == 0 and message["kind"] == "all":
                    with suppress(RuntimeError):  # the next read tells
                        for number in range(deleted, message["read"]):
                            self._reader.delete_key(str(number))
                    deleted = message["read"]

    def _arrived(self, message: Message) -> None:
        with self._lock:
            arrivals: list[tuple[Channel, Message]] = []
            if message["kind"] in ("ended", "lost"):
                if message["rank"] in self.gone:
                    return
                self.gone[message["rank"]] = message
                arrivals = [
                    (opened, _of_channel(message, number)) for number, opened in self._channels.items()
                ]
            elif (number := message["channel"]) in self._channels:
                arrivals = [(self._channels[number], message)]
            elif number >= self._opened:
                self._early.append(message)
        for channel, opened in arrivals:
            channel.deliver(opened)


class Channel:
    """The messages between the ranks of one pipeline, made by :meth:`MessageLog.open`.

    Attributes:
        number: the same on all ranks.
        calls: that all ranks make, and this one has begun. The others hear it when this one closes.
    """

    def __init__(self, log: MessageLog, number: int, deliver: Deliver) -> None:
        self.number, self.deliver = number, deliver
        self.calls = 0
        self._log = log
        self._closed = False

    def send(self, message: Message) -> None:
        """Send a message to all other ranks."""
        self._log.send({**message, "channel": self.number})

    def exchange(self, number: int, value: Any) -> None:
        """Add this rank's value to the exchange with this number."""
        self._log.exchange(self.number, number, value)

    def close(self, message: Message) -> None:
        """Send a last message, and stop delivery. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._log.forget(self)
            self.send({"kind": "closed", "rank": self._log.rank, "calls": self.calls, **message})


def _of_channel(message: Message, number: int) -> Message:
    """Return for one channel what is known of a rank whose process has ended."""
    if message["kind"] == "lost":
        return message
    return {**message, "kind": "closed", "calls": message["calls"].get(str(number), 0)}
