"""Links: the connections of one rank to the others, with the layouts of the messages sent over them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedules import connection_rounds, message_order

from ...ranks import Ranks, waits_in_torch
from ...workers.streams import has_streams
from . import ordered
from .ordered import Edge, Entry, Ordered
from .reductions import Reductions
from .threads import Key

_MOST = 32  # forms of steps that are kept
_UNRELEASED_BYTES = 4 * 2**20  # of messages that may have been sent, and are kept

Fail = Callable[[BaseException], None]


@dataclass
class Table:
    """The messages of steps of one form, on one rank.

    Attributes:
        rows: what each worker of this rank sends and receives, in the order of its actions.
        sent: what this rank sends, by key.
        complete: whether a whole step has run.
        ordered: the messages of this rank in the one order of all ranks, if they are sent in that.
    """

    rows: dict[int, list[Entry]] = field(default_factory=dict)
    sent: dict[Key, Entry] = field(default_factory=dict)
    complete: bool = False
    ordered: list[Entry] | None = None


class Links:
    """The connections of one rank to the others, as long as the pipeline lives.

    Args:
        rank_of: of each worker.
        homes: the device of each worker.
        lanes: the number of ranks of each worker. They send the same messages, each to the rank in its own place.

    Attributes:
        local: the workers of this rank.
        backend: that carries messages from device to device; None if they go through host memory.
        reductions: over replicas of the model; None where there is one.
    """

    def __init__(
        self,
        ranks: Ranks,
        rank_of: Sequence[int],
        homes: Sequence[torch.device],
        lanes: int = 1,
    ) -> None:
        self.ranks = ranks
        self._lanes = lanes
        self.rank_of = rank_of
        self.reductions: Reductions | None = None
        self.local = [worker for worker, rank in enumerate(rank_of) if rank == ranks.rank]
        self.backend = ordered.direct_backend(homes, rank_of)
        self._home = homes[self.local[0]]
        self._edges: dict[Edge, dist.ProcessGroup] = {}
        self._connected: set[Edge] = set()  # of all ranks
        self._arrivals = torch.Stream(self._home) if self.backend and has_streams(self._home) else None
        # The group itself goes through torch's dispatcher, which takes as long as gloo does for a small message.
        self._gloo: list[Any] = [group._get_backend(torch.device("cpu")) for group in ranks.groups]
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

    def agree(self) -> None:
        """Put the messages of steps that have run for the first time in one order; all ranks call this."""
        for table in self._tables.values():
            if self.backend is None or not table.complete or table.ordered is not None:
                continue
            events = {
                worker: [(entry.is_sent, entry.key) for entry in row] for worker, row in table.rows.items()
            }
            shared = self.ranks.gather((ordered.identity(self._home), events))
            if len({device for device, _ in shared}) < len(shared):  # which NCCL refuses
                self.backend = None
                return
            lane = self.ranks.rank % self._lanes
            rows = {
                worker: row for _, events in shared[lane :: self._lanes] for worker, row in events.items()
            }
            messages = [
                (key, (self.rank_of[sender], self.rank_of[receiver]))
                for key, sender, receiver in message_order(rows)
            ]
            self._connect({edge for _, edge in messages})
            entries = {entry.key: entry for row in table.rows.values() for entry in row}
            table.ordered = [entries[key] for key, edge in messages if self.ranks.rank in edge]

    def ordered(self, table: Table) -> Ordered | None:
        """Return what carries the messages of a step in one order; None if they go by tags through host memory."""
        if self.backend is None or table.ordered is None:
            return None
        return Ordered(table.ordered, self.ranks.rank, self._edges, self._home, self._arrivals)

    def _connect(self, edges: set[Edge]) -> None:
        """Connect edges that are new: in rounds, so that no rank waits for one that is busy with another."""
        new = edges - self._connected
        if new and self.backend is not None:
            first = self.ranks.rank % self._lanes
            every = {
                (sender - first + lane, receiver - first + lane)
                for sender, receiver in new
                for lane in range(self._lanes)
            }
            self._edges |= self.ranks.connect(connection_rounds(every), self.backend, self._home)
            self._connected |= new

    def send(self, tensor: Tensor, rank: int, tag: int, fail: Fail) -> None:
        """Begin to send a contiguous tensor, which is kept until it is sent."""
        work = self._gloo[rank > self.ranks.rank].send([tensor], rank, tag)
        with self._lock:
            self._unreleased.append((work, rank))
            self._bytes += tensor.nbytes
        if self._bytes >= _UNRELEASED_BYTES:
            self.release(fail)

    def post(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to receive into a contiguous tensor."""
        return self._gloo[rank < self.ranks.rank].recv([tensor], rank, tag)

    def release(self, fail: Fail) -> None:
        """Release what was sent, as soon as it is.

        Another thread waits for it. It is not woken for each small message, which would slow down the workers.
        """
        with self._lock:
            sent, self._unreleased, self._bytes = self._unreleased, [], 0
        if sent:
            self._departures.put((sent, fail, self.ranks))


def _wait_for_sends(departures: SimpleQueue[Any]) -> None:
    while (departure := departures.get()) is not None:
        with waits_in_torch():
            _wait_for(*departure)
        del departure


def _wait_for(sent: Sequence[tuple[dist.Work, int]], fail: Fail, ranks: Ranks) -> None:
    for work, rank in sent:
        try:
            work.wait()
        except BaseException as error:
            fail(ranks.lost(error, rank))
            return
