"""PeerWatch: finds processes that are killed before they are connected, by the connections of torch.distributed.

A script that has called ``init_process_group`` itself has them already: a receive ends with an error if the process at
the other end does. Each process that comes sends one byte.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

_TAG = 2**31 - 2
_BREAK_TAG = 2**31 - 1
_END_SECONDS = 1.0


class PeerWatch:
    """Waits for a byte of each process that this one waits for.

    Args:
        peers: these processes.

    Attributes:
        lost: those of them that have ended.
    """

    def __init__(self, peers: list[int]) -> None:
        self.lost: list[int] = []
        self._threads: list[threading.Thread] = []
        backends = dist.get_backend_config().split(",")
        if not {"gloo", "cpu:gloo"} & set(backends):
            return  # no connections on the CPU
        for peer in peers:
            self._threads.append(threading.Thread(target=self._wait, args=(peer,), daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        """End all waits, as the process cannot go on: its end would abort threads that wait."""
        if self._threads:
            break_connections(self._group())
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _wait(self, peer: int) -> None:
        try:
            sent, received = torch.zeros(2, 1, dtype=torch.uint8)
            works = self._group().send([sent], peer, _TAG), self._group().recv([received], peer, _TAG)
            for work in works:
                work.wait()
        except RuntimeError:
            self.lost.append(peer)

    @staticmethod
    def _group() -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None
        return group


def break_connections(group: dist.ProcessGroup) -> None:
    """End all waits in a group, on all threads of this process. The group cannot be used any more.

    A receive of gloo whose time is over breaks all connections of its group (gloo's transport/tcp/unbound_buffer.cc).
    So it waits for something that nobody sends. Threads that were left waiting could abort the interpreter at its exit.
    """
    if "gloo" not in dist.get_backend_config(group):
        with suppress(RuntimeError):
            group.abort()
        return
    for peer in (one for one in range(group.size()) if one != group.rank()):
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))
