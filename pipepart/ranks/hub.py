"""Hub: the connections of every process of a job to rank 0, which passes on what one of them has to tell to the others.

::

    rank 1 ── failure ──▶ rank 0 ── failure ──▶ ranks 2, 3, ...
    rank 2 ── end of the connection ──▶ rank 0 ── "rank 2 is lost" ──▶ ranks 1, 3, ...

The operating system closes the connections of a process that is killed, so its death is known at once, whatever the
others do, and never suspected of a process that is merely slow. Connections are kept alive, so a host that is cut off
counts as lost after some seconds.

A process has one hub from its first pipeline to its end. Each pipeline has a channel of it.
"""

from __future__ import annotations

import json
import selectors
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ..forks import listen_for_forks
from .contact import connected

_LEAVE_SECONDS = 1.0  # for the others to report a failure before a launcher ends them

Message = dict[str, Any]
Deliver = Callable[[Message], None]


class Hub:
    """The connections of one process. All processes make it at the same point.

    Args:
        rank, size: of this process, and the number of processes.
        store: that all processes have.
        seconds: to wait for the other ranks.

    Attributes:
        token: the same on all ranks, and new for each start of the job.
        gone: the last words of each rank whose process has ended.

    Raises:
        TimeoutError: not all ranks have come.
        ConnectionError: rank 0 cannot be reached.
        RankError: a rank has ended before.
    """

    def __init__(self, rank: int, size: int, store: Any, seconds: float) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.gone: dict[int, Message] = {}
        self._lock = threading.RLock()  # the handler of a signal may close a pipeline
        self._channels: dict[int, Channel] = {}
        self._opened = 0
        self._early: list[Message] = []  # for channels that are not open here yet
        self._since = time.monotonic()
        self._sockets, self.token = connected(rank, size, store, seconds)
        listen_for_forks(self)
        threading.Thread(target=self._listen, name="pipepart-hub", daemon=True).start()

    def open(self, deliver: Deliver) -> Channel:
        """Return the next channel. All ranks open their channels in the same order.

        Args:
            deliver: called on the hub's thread with each message of the channel from another rank, and with
                ``{"kind": "lost", "rank": k}`` or ``{"kind": "closed", "rank": k, "calls": n, "why": ...}`` for a rank
                whose process is lost or whose script has ended.
        """
        with self._lock:
            channel = Channel(self, self._opened, deliver)
            self._channels[channel.number] = channel
            self._opened += 1
            early = [message for message in self._early if message["channel"] == channel.number]
            self._early = [message for message in self._early if message["channel"] != channel.number]
            for message in [*early, *(_of_channel(one, channel.number) for one in self.gone.values())]:
                deliver(message)
        return channel

    def forget(self, channel: Channel) -> None:
        """Deliver nothing to a channel any more."""
        with self._lock:
            self._channels.pop(channel.number, None)

    def end(self, story: Message, wait: bool) -> None:
        """Tell the other ranks that this script has ended.

        Args:
            story: why, and the traceback of an exception.
            wait: a second for the others to report it.
        """
        calls = {str(number): channel.calls for number, channel in self._channels.items()}
        self.send({"kind": "ended", "rank": self.rank, "calls": calls, **story})
        limit = time.monotonic() + (_LEAVE_SECONDS if wait else 0.0)
        while len(self.gone) < self.size - 1 and time.monotonic() < limit:
            time.sleep(0.01)

    def send(self, message: Message) -> None:
        """Send a message to all other ranks, or to the one in ``message["to"]``. A rank that is gone gets nothing."""
        self._send({**message, "from": self.rank}, self._sockets)

    def forked(self) -> None:
        """Close the copies of the connections in a forked process, which would hide the death of this one."""
        for one in self._sockets.values():
            with suppress(OSError):
                one.close()
        self._sockets = {}

    def _send(self, message: Message, ranks: Iterable[int]) -> None:
        data = json.dumps(message).encode() + b"\n"
        to = message.get("to")
        for rank in list(ranks):
            if self.rank == 0 and to is not None and rank != to:
                continue
            with self._lock, suppress(OSError, KeyError):
                self._sockets[rank].sendall(data)

    def _listen(self) -> None:
        """Receive messages until all connections have ended; runs on the hub's thread."""
        buffers = dict.fromkeys(self._sockets, b"")
        with selectors.DefaultSelector() as selector:
            for rank, one in self._sockets.items():
                selector.register(one, selectors.EVENT_READ, rank)
            while selector.get_map():
                for found, _ in selector.select():
                    rank = found.data
                    try:
                        data = self._sockets[rank].recv(1 << 16)
                    except OSError:  # among them the limit of keep-alive
                        data = b""
                    if data:
                        *lines, buffers[rank] = (buffers[rank] + data).split(b"\n")
                        for line in lines:
                            self._arrived(json.loads(line))
                        continue
                    selector.unregister(found.fileobj)
                    if rank not in self.gone:
                        self._arrived({"kind": "lost", "rank": rank, "from": rank})
        with self._lock:
            for one in self._sockets.values():
                one.close()

    def _arrived(self, message: Message) -> None:
        if self.rank == 0:
            self._send(message, (rank for rank in self._sockets if rank != message["from"]))
        if message.get("to", self.rank) != self.rank:
            return
        with self._lock:
            found: list[tuple[Channel, Message]] = []
            if message["kind"] in ("ended", "lost"):
                self.gone[message["rank"]] = message
                found = [(one, _of_channel(message, number)) for number, one in self._channels.items()]
            elif (number := message["channel"]) in self._channels:
                found = [(self._channels[number], message)]
            elif number >= self._opened and message["kind"] == "ask":
                self._answer(message)
            elif number >= self._opened:
                self._early.append(message)
        for channel, one in found:
            channel.deliver(one)

    def _answer(self, asked: Message) -> None:
        """Answer a question of a pipeline that this rank has not made yet."""
        idle = time.monotonic() - self._since
        doing = [idle, ["is in the script, and has not made this pipeline yet"], []]
        self.send(
            {"kind": "answer", "doing": doing, "to": asked["from"]}
            | {key: asked[key] for key in ("channel", "number")}
        )


class Channel:
    """What the ranks of one pipeline tell each other.

    Args:
        hub: of the process.
        number: the same on all ranks.
        deliver: called with what arrives.

    Attributes:
        calls: that all ranks make, and this one has begun. The others hear it when this one closes.
    """

    def __init__(self, hub: Hub, number: int, deliver: Deliver) -> None:
        self.number, self.deliver = number, deliver
        self.calls = 0
        self._hub = hub
        self._closed = False

    def send(self, message: Message) -> None:
        """Send a message to all other ranks, or to the one in ``message["to"]``."""
        self._hub.send({**message, "channel": self.number})

    def close(self, message: Message) -> None:
        """Send a last message; deliver nothing any more. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._hub.forget(self)
            self.send({"kind": "closed", "rank": self._hub.rank, "calls": self.calls, **message})


def _of_channel(message: Message, number: int) -> Message:
    """Return for one channel what is known of a rank whose process has ended."""
    if message["kind"] == "lost":
        return message
    return {**message, "kind": "closed", "calls": message["calls"].get(str(number), 0)}
