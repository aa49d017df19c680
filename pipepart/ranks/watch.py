"""PeerWatch: detects killed processes by their gloo connections, which the operating system closes.

Rank 0 watches all others, and each of them watches rank 0. So a killed process is known at once, whatever the others
do, and one that is merely slow is never suspected.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..forks import listen_for_forks
from .waiting import waits_in_torch

_TAG = 2**31 - 2
_BREAK_TAG = 2**31 - 1
_LONGEST = timedelta(days=30)
_END_SECONDS = 1.0


class PeerWatch:
    """Waits for a byte that no watched process sends: if one is killed, the broken connection ends the wait.

    ``report`` is called on another thread with a process that has ended.
    """

    def __init__(
        self, store: Any, rank: int, size: int, seconds: float, report: Callable[[int], None]
    ) -> None:
        self._report = report
        self._ended = False
        before = _sockets()
        limit = timedelta(seconds=seconds)
        self._group: Any = dist.ProcessGroupGloo(PrefixStore("watch", store), rank, size, limit)
        self._sockets = dict(_sockets().items() - before.items())
        listen_for_forks(self)
        peers = range(1, size) if rank == 0 else [0]
        self._threads = [
            threading.Thread(target=self._wait, args=(peer,), name="pipepart-watch", daemon=True)
            for peer in peers
        ]
        for thread in self._threads:
            thread.start()

    def forked(self) -> None:
        """Close the copies of the connections in a forked process, which would hide the death of this one."""
        for number, _ in self._sockets.items() & _sockets().items():
            with suppress(OSError):
                os.close(number)

    def end(self) -> None:
        """End all waits, as the script ends: a thread that waits would abort the process."""
        self._ended = True
        _break(self._group)
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _wait(self, peer: int) -> None:
        try:
            with waits_in_torch():
                self._group.recv([torch.zeros(1)], peer, _TAG).wait(_LONGEST)
        except RuntimeError:
            if not self._ended:
                self._report(peer)


def _sockets() -> dict[int, str]:
    """Return what the sockets of this process are, by the numbers of their files; nothing where there is no /proc."""
    sockets: dict[int, str] = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                    sockets[int(name)] = target
    return sockets


def break_connections(group: dist.ProcessGroup) -> None:
    """End all waits in a group, on all threads of this process. The group is unusable afterwards."""
    backends = dist.get_backend_config(group)
    if "gloo" not in backends:
        with suppress(RuntimeError):
            group.abort()
        return
    if "nccl" in backends:
        nccl: Any = group._get_backend(torch.device("cuda"))
        with suppress(RuntimeError):
            nccl.abort()
    _break(group)


def _break(group: Any) -> None:
    """Break the connections of a group of gloo.

    A receive whose time is over breaks all connections of its group (gloo's transport/tcp/unbound_buffer.cc). So it
    waits for something that nobody sends. Threads that were left waiting could abort the interpreter at its exit.
    """
    for peer in (peer_rank for peer_rank in range(group.size()) if peer_rank != group.rank()):
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))
