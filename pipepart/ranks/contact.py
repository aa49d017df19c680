"""Connects every process of a job to rank 0, by the store of torch.distributed.

::

    rank 0   listens ── address, token ──▶ store              ┌─▶ accept, answer
    rank 1                                 store ── address ──┴── connect, token

torch 2.13 keeps the store of a job that torchrun starts again, with what the processes before have written. So an
address counts only if rank 0 answers there.

A process that ends before it is connected leaves word in the store, for those that wait for it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .failure import RankError, has_closed, is_lost
from .watch import PeerWatch

_POLL_SECONDS = 0.05  # between two looks into the store
_REACH_SECONDS = 60.0  # for rank 0 to answer at the address that it has given
_HELLO_SECONDS = 5.0  # for a process that connects to say who it is
_HELLO_BYTES = 1024  # of what it says
_LEAVE_SECONDS = 0.5
_ADDRESS = "pipepart/rank 0"
_ENDED = "pipepart/ended"
_KEEP_ALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 7000))
_SEND_SECONDS = 5.0  # for a message that a process does not read


def connected(rank: int, size: int, store: Any, seconds: float) -> tuple[dict[int, socket.socket], str]:
    """Return connections, those of rank 0 to all others or of another rank to rank 0, and a token that all ranks share.

    Args:
        rank, size: of this process, and the number of processes.
        store: that all processes have.
        seconds: to wait for the other ranks.

    Raises:
        TimeoutError: not all ranks have come.
        ConnectionError: rank 0 cannot be reached.
        RankError: a rank has ended.
    """
    end = time.monotonic() + seconds
    watch = PeerWatch(list(range(1, size)) if rank == 0 else [0]) if dist.is_initialized() else None
    check = partial(_check, store, watch)
    try:
        if rank == 0:
            sockets, token = _accepted(size, store, check, end)
        else:
            one, token = _reached(rank, store, check, end)
            sockets = {0: one}
    except BaseException:
        if watch is not None:
            watch.end()
        raise
    for one in sockets.values():
        _keep_alive(one)
    return sockets, token


def leave_word(store: Any, rank: int, story: Mapping[str, Any]) -> None:
    """Tell processes that wait that one has ended before it was connected. The first word counts.

    Args:
        store: that all processes have.
        rank: that has ended.
        story: the message that the hub would send.
    """
    if _tells():
        with suppress(RuntimeError):  # the process that has the store has ended
            store.compare_set(_ENDED, "", json.dumps({**story, "rank": rank, "from": rank}))
            time.sleep(_LEAVE_SECONDS)  # for others to read it, if the store ends with this process


def _tells() -> bool:
    """Return whether word in the store is of this attempt: torchrun keeps the store if it starts processes again.

    Where it does so, it ends those that wait.
    """
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"


def _check(store: Any, watch: PeerWatch | None) -> None:
    """Raise if a process has ended before it was connected.

    Raises:
        RankError: one has.
    """
    try:
        found = _tells() and store.check([_ENDED]) and json.loads(store.get(_ENDED))
    except RuntimeError:
        raise is_lost(0) from None  # the only process that may have the store, if torchrun has not
    if found:
        raise is_lost(found["rank"]) if found["kind"] == "lost" else has_closed(found["rank"], found)
    if watch is not None and watch.lost:
        leave_word(store, watch.lost[0], {"kind": "lost"})
        _check(store, None)


def _accepted(
    size: int, store: Any, check: Callable[[], None], end: float
) -> tuple[dict[int, socket.socket], str]:
    """On rank 0, return a connection to each other rank, and the token."""
    found: dict[int, socket.socket] = {}
    token, answer = secrets.token_hex(), secrets.token_hex()
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=size) as server:
        address = {"hosts": _own_hosts(store), "port": server.getsockname()[1]}
        store.set(_ADDRESS, json.dumps({**address, "token": token, "answer": answer}))
        server.settimeout(_POLL_SECONDS)
        try:
            while len(found) < size - 1:
                _accept(server, found, token, answer, size)
                check()
                for rank, known in found.items():
                    if _has_ended(known):
                        leave_word(store, rank, {"kind": "lost"})
                        check()
                if time.monotonic() > end:
                    missing = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
                    raise TimeoutError(
                        f"of the {size} ranks {missing} did not make the pipeline in time, which all ranks make at "
                        "the same point of the script: do they wait elsewhere, or have they been killed before?"
                    )
        except RankError:
            # Those that are connected look into the store no more, and would take this process for the lost one.
            with suppress(OSError, RuntimeError):
                word = store.get(_ENDED) + b"\n"
                for one in found.values():
                    one.sendall(word)
            raise
    return found, token


def _accept(
    server: socket.socket, found: dict[int, socket.socket], token: str, answer: str, size: int
) -> None:
    """Take the connection of a rank that says the token, if one comes soon."""
    try:
        one, _ = server.accept()
    except TimeoutError:
        return
    with suppress(OSError, ValueError, RecursionError):  # of a stranger, who may send anything
        hello = json.loads(_line(one))
        if isinstance(hello, dict) and secrets.compare_digest(
            str(hello.get("token")).encode(), token.encode()
        ):
            rank = hello.get("rank")
            if type(rank) is int and 0 < rank < size and (rank not in found or _has_ended(found[rank])):
                one.sendall(answer.encode() + b"\n")
                found[rank] = one
                return
    one.close()


def _has_ended(one: socket.socket) -> bool:
    """Return whether the other end of a connection is closed; what it has sent stays to be read."""
    readable, _, _ = select.select([one], [], [], 0)
    try:
        return bool(readable) and not one.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _reached(rank: int, store: Any, check: Callable[[], None], end: float) -> tuple[socket.socket, str]:
    """Return a connection to rank 0, and its token."""
    found, errors, give_up = b"", [""], end
    while True:
        check()
        if store.check([_ADDRESS]) and (now := store.get(_ADDRESS)) != found:
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
            f"rank {rank} makes the pipeline and rank 0 does not, which all ranks make at the same point of the "
            "script: does it wait elsewhere, or was it killed before?"
        )
    raise ConnectionError(
        f"rank {rank} cannot connect to rank 0, by which ranks tell each other of failures: {'; '.join(errors)}"
    )


def _line(one: socket.socket) -> str:
    """Return the first line that a process sends, and leave what follows.

    Raises:
        OSError: the line is not complete in time, or longer than any that a rank sends.
        ValueError: it is not text.
    """
    found = b""
    end = time.monotonic() + _HELLO_SECONDS
    while not found.endswith(b"\n"):
        one.settimeout(max(end - time.monotonic(), 1e-3))
        if len(found) == _HELLO_BYTES or not (data := one.recv(1)):
            raise ConnectionError("the connection has ended, or does not come from a rank")
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
