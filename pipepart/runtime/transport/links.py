"""Links: the connections of one rank to the others, and what is known of the messages that go over them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ...ranks import Ranks
from .reductions import Reductions
from .threads import Key
from .wire import Form

_MOST = 32  # forms of steps that are kept
_UNRELEASED_BYTES = 4 * 2**20  # of messages that may have been sent, and are kept

Fail = Callable[[BaseException], None]


class Sent(NamedTuple):
    """A message that this rank sends.

    Attributes:
        form: what it looks like.
        rank: of its receiver.
        tag: its first.
    """

    form: Form
    rank: int
    tag: int


class Expected(NamedTuple):
    """A message that this rank receives.

    Attributes:
        key: of the message.
        form: what it looks like.
        rank: of its sender.
        tag: its first.
    """

    key: Key
    form: Form
    rank: int
    tag: int


@dataclass
class Table:
    """The messages of steps of one form, on one rank.

    Attributes:
        sent: by key.
        received: by worker, in the order of their use.
        complete: whether a whole step has run.
        corrected: the stages of other ranks than the last stage's whose optimizers step within the step.
    """

    sent: dict[Key, Sent] = field(default_factory=dict)
    received: dict[int, list[Expected]] = field(default_factory=dict)
    complete: bool = False
    corrected: tuple[int, ...] | None = None


class Links:
    """The connections of one rank to the others, as long as the pipeline lives.

    Args:
        ranks: the processes.
        rank_of: of each worker.

    Attributes:
        local: the workers of this rank.
        reductions: over replicas of the model; None where there is one.
    """

    def __init__(self, ranks: Ranks, rank_of: Sequence[int]) -> None:
        self.ranks = ranks
        self.rank_of = rank_of
        self.reductions: Reductions | None = None
        self.local = [worker for worker, rank in enumerate(rank_of) if rank == ranks.rank]
        self._tables: OrderedDict[Hashable, Table] = OrderedDict()
        self._lock = threading.Lock()
        self._unreleased: list[tuple[dist.Work, int]] = []
        self._bytes = 0
        self._departures: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(
            target=_wait_for_sends,
            args=(self._departures,),
            name="pipepart-departures",
            daemon=True,  # it may wait for a rank that is lost
        ).start()
        weakref.finalize(self, self._departures.put, None).atexit = False

    def table(self, form: Hashable) -> Table:
        """Return what is known of the messages of a step; all ranks ask in the same order."""
        if form in self._tables:
            self._tables.move_to_end(form)
        else:
            self._tables[form] = Table()
            if len(self._tables) > _MOST:
                self._tables.popitem(last=False)
        return self._tables[form]

    def send(self, tensor: Tensor, rank: int, tag: int, fail: Fail) -> None:
        """Begin to send a contiguous tensor, which is kept until it is sent."""
        work = self.ranks.group.send([tensor], rank, tag)
        with self._lock:
            self._unreleased.append((work, rank))
            self._bytes += tensor.nbytes
        if self._bytes >= _UNRELEASED_BYTES:
            self.release(fail)

    def post(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to receive into a contiguous tensor."""
        return self.ranks.group.recv([tensor], rank, tag)

    def release(self, fail: Fail) -> None:
        """Release what was sent, as soon as it is.

        Another thread waits for it. It is not woken for each small message, which would slow down the workers.
        """
        with self._lock:
            sent, self._unreleased, self._bytes = self._unreleased, [], 0
        if sent:
            self._departures.put((sent, fail, self.ranks))


def _wait_for_sends(departures: SimpleQueue[Any]) -> None:
    while (given := departures.get()) is not None:
        _wait_for(*given)
        del given


def _wait_for(sent: Sequence[tuple[dist.Work, int]], fail: Fail, ranks: Ranks) -> None:
    for work, rank in sent:
        try:
            work.wait()
        except BaseException as error:
            fail(ranks.lost(error, rank))
            return
