"""Sends and receives the messages of a step in one order on all ranks, because NCCL has no tags.

NCCL matches the messages from one rank to another by their order, and a message that cannot go yet holds up those
behind it. So all ranks take the messages of a step in one order. Each comes after those that its sender received
before it made it::

    order              0: F of micro-batch 0     1: F of micro-batch 1     2: B of micro-batch 0
    rank 0             F0  send 0   F1  send 1   receive 2  B0
    rank 1             receive 0   receive 1   F0  B0  send 2

Before a rank sends or needs a message, it begins all that come before it in this order. Those are messages that it
receives, and that it has sent already, so it never waits for that. Even one queue a rank without buffers cannot
deadlock. Each directed edge between ranks has a communicator of its own.

Which messages there are is known after the first step of a form. That step sends them by tags, through the memory of
the host. On an accelerator the host never waits: a send waits for the worker's compute stream, and the compute stream
waits for a receive, which begins on a stream beside it.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...input_error import InputError
from ...workers.streams import Wait, on_streams, waits
from .threads import Key
from .wire import Form, buffers_for

_AHEAD = 2  # receives that have begun before they are needed

Edge = tuple[int, int]  # from a rank, to a rank


class Entry(NamedTuple):
    """A message that this rank sends or receives.

    Attributes:
        key: of the message.
        form: what it looks like.
        rank: at the other end.
        tag: its first.
        is_sent: whether this rank sends it.
    """

    key: Key
    form: Form
    rank: int
    tag: int
    is_sent: bool


class Ordered:
    """The messages of one step on one rank, which has one worker. Used by its thread, with its streams entered.

    Args:
        entries: those that the rank sends or receives, in the order of all ranks.
        rank: of this process.
        groups: the communicator of each edge.
        device: of the worker.
        arrivals: the stream that receives begin on; None on a device without streams.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        rank: int,
        groups: Mapping[Edge, dist.ProcessGroup],
        device: torch.device,
        arrivals: torch.Stream | None,
    ) -> None:
        self._left = deque(entries)
        self._rank = rank
        self._groups = groups
        self.device = device
        self._arrivals = arrivals
        self._begun: dict[Key, tuple[Form, list[Tensor], list[dist.Work]]] = {}
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, key: Key, buffers: Sequence[Tensor]) -> None:
        """Begin to send a message, behind all that come before it."""
        group = self._groups[self._rank, self._reach(key).rank]
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        for buffer in buffers:
            if buffer.numel():
                self._sent.append((group.send([_bytes(buffer)], _other(group), 0), buffer))

    def take(self, key: Key) -> tuple[Form, list[Tensor]]:
        """Return a message, whose bytes are there for what the worker queues from now on."""
        if key not in self._begun:
            self._receive(self._reach(key))
        form, buffers, works = self._begun.pop(key)
        while self._left and not self._left[0].is_sent and len(self._begun) < _AHEAD:
            self._receive(self._left.popleft())
        for work in works:
            work.wait()
        if self._arrivals is not None:
            compute = torch.accelerator.current_stream(self.device)
            for buffer in buffers:
                waits.hold(Wait.HELD_FOR_COMPUTE, buffer, compute)
        return form, buffers

    def finish(self) -> None:
        """Keep what was sent until it is: what the worker queues from now on waits for that."""
        while self._sent:
            self._sent[0][0].wait()
            self._sent.popleft()

    def _reach(self, key: Key) -> Entry:
        """Return the message of a key, after all receives before it have begun."""
        while self._left:
            entry = self._left.popleft()
            if entry.key == key:
                return entry
            if entry.is_sent:
                break
            self._receive(entry)
        raise InputError(
            f"message {key} has another place than in an earlier step whose mini-batch had the same shapes: under "
            "torchrun what stages pass on is to follow from the shapes of the mini-batch"
        )

    def _receive(self, entry: Entry) -> None:
        group = self._groups[entry.rank, self._rank]
        beside: AbstractContextManager[Any] = nullcontext()
        if self._arrivals is not None:  # behind the compute stream it would wait for all that is queued there
            beside = on_streams([self._arrivals])
        with beside:
            buffers = buffers_for(entry.form, self.device)
            works = [group.recv([_bytes(buffer)], _other(group), 0) for buffer in buffers if buffer.numel()]
        self._begun[entry.key] = entry.form, buffers, works


def direct_backend(homes: Sequence[torch.device], rank_of: Sequence[int]) -> str | None:
    """Return the backend that carries messages between the devices of workers; None to go through host memory."""
    several = len(set(rank_of)) < len(rank_of)  # one order of messages is for one worker a rank
    if several or any(home.type != "cuda" for home in homes) or not dist.is_nccl_available():
        return None
    return "nccl" if "nccl" in dist.get_backend_config() else None


def identity(device: torch.device) -> Hashable:
    """Return what tells a device from those of other processes and hosts."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname(), os.getpid()


def _bytes(buffer: Tensor) -> Tensor:
    """Return a buffer as bytes, as not every backend knows every type."""
    return buffer.detach().view(-1).view(torch.uint8)


def _other(group: dist.ProcessGroup) -> int:
    """Return the number of the other rank in a group of two."""
    return 1 - group.rank()
