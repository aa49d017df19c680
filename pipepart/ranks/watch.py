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
from .leaving import waits_in_torch

_TAG = 2**31 - 2
_BREAK_TAG = 2**31 - 1
_LONGEST = timedelta(days=30)
_END_SECONDS = 1.0


class PeerWatch:
    """Waits for a byte from each watched process. If the process is killed, the broken connection ends the wait.

    Args:
        group: of gloo, of all processes.
        peers: the processes that are watched.
        is_awaited: whether each of them sends its byte when it comes; else none does, and the wait ends with its
            process only.
        report: called on another thread with a process that has ended.

    Attributes:
        lost: those of them that have ended.
    """

    def __init__(
        self,
        group: Any,
        peers: list[int],
        is_awaited: bool,
        report: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.lost: list[int] = []
        self._group, self._is_awaited, self._report = group, is_awaited, report
        self._ended = False
        self._sockets: dict[int, str] = {}
        self._threads = [threading.Thread(target=self._wait, args=(peer,), daemon=True) for peer in peers]
        for thread in self._threads:
            thread.start()

    @classmethod
    def of_script(cls, peers: list[int]) -> PeerWatch:
        """Watch processes that may not have come, by the process group that the script has made, if it has gloo."""
        backends = dist.get_backend_config().split(",")
        return cls(dist.group.WORLD, peers if {"gloo", "cpu:gloo"} & set(backends) else [], is_awaited=True)

    @classmethod
    def of_job(
        cls, store: Any, rank: int, size: int, seconds: float, report: Callable[[int], None]
    ) -> PeerWatch:
        """Watch processes that are here, until the end of the script, by a group that nobody else uses."""
        limit = timedelta(seconds=seconds)
        before = _sockets()
        group = dist.ProcessGroupGloo(PrefixStore("watch", store), rank, size, limit)
        watch = cls(group, list(range(1, size)) if rank == 0 else [0], is_awaited=False, report=report)
        watch._sockets = dict(_sockets().items() - before.items())
        listen_for_forks(watch)
        return watch

    def forked(self) -> None:
        """Close the copies of the connections in a forked process, which would hide the death of this one."""
        for number, _ in self._sockets.items() & _sockets().items():
            with suppress(OSError):
                os.close(number)

    def end(self) -> None:
        """End all waits, as the script ends: a thread that waits would abort the process."""
        self._ended = True
        if self._threads:
            _break(self._group)
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _wait(self, peer: int) -> None:
        try:
            sent, received = torch.zeros(2, 1, dtype=torch.uint8)
            works = [self._group.send([sent], peer, _TAG)] if self._is_awaited else []
            works.append(self._group.recv([received], peer, _TAG))
            with waits_in_torch():
                for work in works:
                    work.wait(_LONGEST)
        except RuntimeError:
            if not self._ended:
                self.lost.append(peer)
                self._report(peer)


def _sockets() -> dict[int, str]:
    """Return what the sockets of this process are, by the numbers of their files; nothing where there is no /proc."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                    found[int(name)] = target
    return found


def break_connections(group: dist.ProcessGroup) -> None:
    """End all waits in a group, on all threads of this process. The group is unusable afterwards."""
    if "gloo" not in dist.get_backend_config(group):
        with suppress(RuntimeError):
            group.abort()
        return
    _break(group)


def _break(group: Any) -> None:
    """Break the connections of a group of gloo.

    A receive whose time is over breaks all connections of its group (gloo's transport/tcp/unbound_buffer.cc). So it
    waits for something that nobody sends. Threads that were left waiting could abort the interpreter at its exit.
    """
    for peer in (one for one in range(group.size()) if one != group.rank()):
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))
