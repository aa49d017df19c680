"""Hub: connects every rank of a pipeline to rank 0, which passes on what one of them has to tell to the others.

::

    rank 1 ── failure ──▶ rank 0 ── failure ──▶ ranks 2, 3, ...
    rank 2 ── end of the connection ──▶ rank 0 ── "rank 2 is lost" ──▶ ranks 1, 3, ...

The operating system closes the connections of a process that is killed, so its death is known at once, whatever the
others do, and never suspected of a process that is merely slow. Connections are kept alive, so a host that is cut off
counts as lost after some seconds.
"""

from __future__ import annotations

import atexit
import json
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..forks import listen_for_forks
from .failure import told

_POLL_SECONDS = 0.05  # between two looks into the store for the address of rank 0
_REACH_SECONDS = 60.0  # for rank 0 to answer at the address that it has given
_HELLO_SECONDS = 5.0  # for a process that connects to say who it is
_SEND_SECONDS = 5.0  # for a message that a process does not read
_LEAVE_SECONDS = 1.0  # for the others to report a failure before a launcher ends them
_KEEP_ALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 7000))

Message = dict[str, Any]
_OPEN: weakref.WeakSet[Hub] = weakref.WeakSet()


class Hub:
    """The connections of one rank. All ranks make it at the same point.

    Args:
        rank, size: of this process, and the number of processes.
        store: of the process group.
        key: in the store, of this hub alone.
        deliver: called on a thread of the hub with each message from another rank. A lost rank is a message, too:
            ``{"kind": "lost", "rank": k}``.
        seconds: to wait for the other ranks.

    Attributes:
        calls: that all ranks make, and this one has begun. The others hear it when this one closes.
        left: the ranks that have closed, or are lost.
        token: of this hub, the same on all ranks.

    Raises:
        TimeoutError: not all ranks have come.
        ConnectionError: rank 0 cannot be reached.
    """

    def __init__(
        self, rank: int, size: int, store: Any, key: str, deliver: Callable[[Message], None], seconds: float
    ) -> None:
        self.rank, self.size = rank, size
        self.closed = False
        self.calls = 0
        self.left: set[int] = set()
        self._deliver = deliver
        self._lock = threading.RLock()  # the handler of a signal may close the pipeline
        end = time.monotonic() + seconds
        self._sockets: dict[int, socket.socket]
        if rank == 0:
            self._sockets, self.token = _accepted(size, store, key, end)
        else:
            one, self.token = _connected(rank, store, key, end)
            self._sockets = {0: one}
        for one in self._sockets.values():
            _keep_alive(one)
        listen_for_forks(self)
        _OPEN.add(self)
        threading.Thread(target=self._listen, name="pipepart-hub", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message to all other ranks, or to the one in ``message["to"]``. A rank that is gone gets nothing."""
        self._send({**message, "from": self.rank}, self._sockets)

    def close(self, message: Message) -> None:
        """Send a last message; deliver nothing any more. Closing twice does nothing.

        Rank 0 goes on to pass on the messages of others until they have closed as well.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self.send({"kind": "closed", "rank": self.rank, "calls": self.calls, **message})
        if self.rank != 0:
            with self._lock, suppress(OSError, KeyError):
                self._sockets[0].shutdown(socket.SHUT_WR)

    def forked(self) -> None:
        """Close the copies of the connections in a forked process, which would hide the death of this one."""
        self.closed = True
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
                    if rank not in self.left:
                        self._arrived({"kind": "lost", "rank": rank, "from": rank})
        with self._lock:
            for one in self._sockets.values():
                one.close()

    def _arrived(self, message: Message) -> None:
        if message["kind"] in ("closed", "lost"):
            self.left.add(message["rank"])
        if self.rank == 0:
            self._send(message, (rank for rank in self._sockets if rank != message["from"]))
        if not self.closed and message.get("to", self.rank) == self.rank:
            self._deliver(message)


def _accepted(size: int, store: Any, key: str, end: float) -> tuple[dict[int, socket.socket], str]:
    """On rank 0, return a connection to each other rank, and the token."""
    found: dict[int, socket.socket] = {}
    token, answer = secrets.token_hex(), secrets.token_hex()
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=size) as server:
        address = {"hosts": _own_hosts(store), "port": server.getsockname()[1]}
        store.set(key, json.dumps({**address, "token": token, "answer": answer}))
        while len(found) < size - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                one, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
                raise TimeoutError(
                    f"of the {size} ranks {missing} did not make the pipeline in time, which all ranks make at the "
                    "same point of the script: have they failed before, or do they wait elsewhere?"
                ) from None
            with suppress(OSError, ValueError, KeyError):  # of a stranger
                one.settimeout(_HELLO_SECONDS)
                hello = json.loads(_line(one))
                if secrets.compare_digest(hello["token"], token):
                    one.sendall(answer.encode() + b"\n")
                    found[hello["rank"]] = one
                    continue
            one.close()
    return found, token


def _connected(rank: int, store: Any, key: str, end: float) -> tuple[socket.socket, str]:
    """Return a connection to rank 0, and its token.

    The store of a job that was restarted may have the address of rank 0 before: what does not answer is asked for anew.
    """
    found, errors, give_up = b"", [""], end
    while True:
        if store.check([key]) and (now := store.get(key)) != found:
            found, give_up = now, min(end, time.monotonic() + _REACH_SECONDS)
        if found:
            address, errors = json.loads(found), []
            for host in address["hosts"]:
                try:
                    one = socket.create_connection((host, address["port"]), timeout=_HELLO_SECONDS)
                    one.sendall(json.dumps({"rank": rank, "token": address["token"]}).encode() + b"\n")
                    if _line(one) == address["answer"]:
                        return one, address["token"]
                    one.close()
                    errors.append(f"{host}: another program answers")
                except OSError as error:
                    errors.append(f"{host}: {error}")
        if time.monotonic() > give_up:
            break
        time.sleep(_POLL_SECONDS)
    if not found:
        raise TimeoutError(
            f"rank {rank} has made the pipeline and rank 0 has not, which all ranks make at the same point of the "
            "script: has it failed before, or does it wait elsewhere?"
        )
    raise ConnectionError(
        f"rank {rank} cannot connect to rank 0, by which ranks tell each other of failures: {'; '.join(errors)}"
    )


def _line(one: socket.socket) -> str:
    """Return the first line that a process sends, and leave what follows."""
    found = b""
    while not found.endswith(b"\n"):
        if not (data := one.recv(1)):
            raise ConnectionError("the connection has ended")
        found += data
    return found.decode().strip()


def _own_hosts(store: Any) -> list[str]:
    """Return addresses under which the other ranks may reach this process, the likeliest first."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return ["localhost"]  # a file: one host
    found = []
    with suppress(OSError), socket.create_connection((store.host, store.port), _HELLO_SECONDS) as one:
        found.append(one.getsockname()[0])  # of the interface on the way to the store
    return list(dict.fromkeys([*found, store.host, socket.gethostname()]))


def _keep_alive(one: socket.socket) -> None:
    one.settimeout(_SEND_SECONDS)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@atexit.register
def _script_ended() -> None:
    """Tell the other ranks that the script has ended, and by which exception."""
    interactive = sys.flags.interactive or hasattr(sys, "ps1")
    error = None if interactive else getattr(sys, "last_value", None)
    story = told(error) if error is not None else {}
    during = f" with {story['what']}" if story else ""
    for hub in list(_OPEN):
        hub.close({"why": f"its script has ended{during}", "traceback": story.get("traceback", "")})
        end = time.monotonic() + (_LEAVE_SECONDS if error is not None else 0.0)
        while len(hub.left) < hub.size - 1 and time.monotonic() < end:
            time.sleep(0.01)
