"""Carries messages between stages of different processes by torch.distributed's sends and receives.

::

    rank 0                                                          rank 1
    worker: F(0, k) ── send ──▶ pack ── gloo, tag of the key ──▶ arrivals thread ── mailbox ──▶ worker: F(1, k)
              departures thread: keeps the buffers until they are sent

The first step with some shapes sends the form of each message before its bytes. Both ends keep it, and the receiver
the order in which it used the messages. From then on only bytes are sent, and receives are posted ahead in that order.
A message between stages of one process goes through the transport inside.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedules import Kind, Schedule

from ...autograd import graph_cut
from ...capture import Live, Recording
from ...input_error import InputTypeError
from ...ranks import Ranks
from .reductions import Reductions
from .threads import Key, ThreadTransport, Transport
from .wire import Form, pack, unpack

_AHEAD = 4  # receives that are posted before their messages are needed
_MOST = 32  # forms of steps that are kept
_PARTS = 32  # tags of one message: the length of its form, the form, and its buffers
_LARGEST_TAG = 2**31 - 1
_RELEASE_SECONDS = 0.005
_HOST = torch.device(
    "cpu"
)  # messages of accelerators go through its memory; a stage moves what it gets to its device
_KINDS = (Kind.F, Kind.B, Kind.OPT_STEP, Kind.REDUCE_GRAD)  # of keys; a shared parameter has its number

Fail = Callable[[BaseException], None]


@dataclass
class Table:
    """The messages of steps of one form, on one rank.

    Attributes:
        sent: forms, by key.
        received: by worker, in the order of their use: key, sending stage and form.
        complete: whether a whole step has run.
        corrected: the stages of other ranks than the last stage's whose optimizers step within the step.
    """

    sent: dict[Key, Form] = field(default_factory=dict)
    received: dict[int, list[tuple[Key, int, Form]]] = field(default_factory=dict)
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
        self._departures: SimpleQueue[Any] = SimpleQueue()
        self._arrivals: dict[int, SimpleQueue[Any]] = {worker: SimpleQueue() for worker in self.local}
        threads = [Thread(target=_wait_for_sends, args=(self._departures,), name="pipepart-departures")]
        threads += [
            Thread(target=_run, args=(jobs,), name=f"pipepart-arrivals-{worker}")
            for worker, jobs in self._arrivals.items()
        ]
        for thread in threads:
            thread.daemon = True  # it may wait for a rank that is lost
            thread.start()
        weakref.finalize(self, _end, [self._departures, *self._arrivals.values()]).atexit = False

    def table(self, form: Hashable) -> Table:
        """Return what is known of the messages of a step; all ranks ask in the same order."""
        if form in self._tables:
            self._tables.move_to_end(form)
        else:
            self._tables[form] = Table()
            if len(self._tables) > _MOST:
                self._tables.popitem(last=False)
        return self._tables[form]

    def submit(self, worker: int, job: Callable[[], None]) -> None:
        """Run a job on the arrivals thread of a worker."""
        self._arrivals[worker].put(job)

    def send(self, tensor: Tensor, rank: int, tag: int, fail: Fail) -> None:
        """Begin to send a contiguous tensor; it is kept until it is sent."""
        work = self.ranks.group.send([tensor], rank, tag)
        self._departures.put((work, tensor, fail, rank, self.ranks))

    def post(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to receive into a contiguous tensor."""
        return self.ranks.group.recv([tensor], rank, tag)


class RankTransport:
    """The messages of one step, to and from other processes.

    Args:
        inner: carries messages between stages of this process.
        mailboxes: of the workers of this process.
        schedule: of the step.
        links: to the other ranks.
        table: the messages of steps like this one.
        follower: returns for a shared parameter and a stage the later stage that sends its gradient; by their numbers.
        inputs: of the micro-batches, whose recordings live values belong to.
        fail: ends the step.
    """

    def __init__(
        self,
        inner: Transport,
        mailboxes: ThreadTransport,
        schedule: Schedule,
        links: Links,
        table: Table,
        follower: Callable[[int, int], int],
        inputs: Sequence[Any],
        fail: Fail,
    ) -> None:
        self._inner = inner
        self._mailboxes = mailboxes
        self._schedule = schedule
        self._worker_of = schedule.device_of
        self._links = links
        self._table = table
        self._follower = follower
        self._recordings: list[Recording | None] = [
            one.recording if isinstance(one, Live) else None for one in inputs
        ]
        self._fail = fail
        if table.complete:
            for worker in links.local:
                if table.received.get(worker):
                    links.submit(worker, partial(self._receive_known, table.received[worker]))

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Send a message to the rank of the receiver.

        Raises:
            TypeError: other ranks cannot get it.
            RuntimeError: it has another form than before.
        """
        rank = self._rank_of(receiver)
        if rank == self._links.ranks.rank:
            self._inner.send(sender, receiver, key, message)
            return
        form, buffers = pack(graph_cut.move(message, _HOST))
        if len(buffers) > _PARTS - 2:
            raise InputTypeError(
                f"stage {sender} passes {len(buffers)} tensors to another rank, at most {_PARTS - 2} can be passed"
            )
        tag = self._tag(key, sender)
        known = self._table.sent.get(key)
        if known is None:
            self._table.sent[key] = form
            header = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
            self._links.send(torch.tensor([len(header)]), rank, tag, self._fail)
            self._links.send(header, rank, tag + 1, self._fail)
        elif known != form:
            raise RuntimeError(_changed(sender, known, form))
        for place, buffer in enumerate(buffers, tag + 2):
            if len(buffer):
                self._links.send(buffer, rank, place, self._fail)

    def recv(self, receiver: int, key: Key) -> Any:
        """Wait for a message.

        Raises:
            Stopped: the step has failed.
        """
        sender = self._sender(key)
        if self._rank_of(sender) != self._links.ranks.rank:
            if not self._table.complete:
                job = partial(self._receive_new, self._worker_of[receiver], sender, key)
                self._links.submit(self._worker_of[receiver], job)
            return self._mailboxes.recv(receiver, key)
        return self._inner.recv(receiver, key)

    @property
    def corrected(self) -> tuple[int, ...]:
        """The stages whose optimizers step with a factor that the rank of the last stage knows.

        None with replicas, whose loss must be divided by what is known before the first backward.
        """
        if self._table.corrected is None:
            last = self._rank_of(self._schedule.stages - 1)
            actions = (action for row in self._schedule.actions for action in row)
            steps = dict.fromkeys(action.stage for action in actions if action.kind is Kind.OPT_STEP)
            away = tuple(stage for stage in steps if self._rank_of(stage) != last)
            none = self._schedule.versions or self._schedule.replicas > 1
            self._table.corrected = () if none else away
        return self._table.corrected

    def finish(self) -> None:
        """Called after a step that has not failed."""
        self._table.complete = True

    def _rank_of(self, stage: int) -> int:
        return self._links.rank_of[self._worker_of[stage]]

    def _sender(self, key: Key) -> int:
        kind, stage = key[:2]
        if len(key) == 4:
            return key[3]
        if kind is Kind.F:
            return stage - 1
        if kind is Kind.OPT_STEP:
            return self._schedule.stages - 1
        return stage + 1 if isinstance(kind, Kind) else self._follower(kind, stage)

    def _tag(self, key: Key, sender: int) -> int:
        """Return the first tag of a message, the same on both ranks; no other one in the step has it."""
        kind, stage, micro_batch = key[:3]
        kinds = _KINDS.index(kind) if isinstance(kind, Kind) else len(_KINDS) + kind
        stages = self._schedule.stages
        number = (kinds * stages + stage) * self._schedule.micro_batches + (micro_batch or 0)
        tag = (number * stages + sender) * _PARTS
        if tag > _LARGEST_TAG - _PARTS:
            raise RuntimeError(
                f"{stages} stages and {self._schedule.micro_batches} micro-batches have more messages than gloo has "
                "tags: plan with fewer micro-batches"
            )
        return tag

    def _receive_new(self, worker: int, sender: int, key: Key) -> None:
        """Receive a message of unknown form, on the arrivals thread."""
        rank, tag = self._rank_of(sender), self._tag(key, sender)
        try:
            length = torch.empty(1, dtype=torch.int64)
            self._links.post(length, rank, tag).wait()
            header = torch.empty(int(length), dtype=torch.uint8)
            self._links.post(header, rank, tag + 1).wait()
            form: Form = pickle.loads(header.numpy().tobytes())
            self._deliver(key, sender, form, *self._posted(key, sender, form))
        except BaseException as error:
            self._fail(self._links.ranks.lost(error, rank))
            return
        self._table.received.setdefault(worker, []).append((key, sender, form))

    def _receive_known(self, expected: Sequence[tuple[Key, int, Form]]) -> None:
        """Receive all messages of the step for one worker, a few ahead of their use, on the arrivals thread."""
        posted: deque[tuple[Key, int, Form, list[Tensor], list[dist.Work]]] = deque()
        left = iter(expected)
        rank = -1
        try:
            while True:
                for key, sender, form in left:
                    posted.append((key, sender, form, *self._posted(key, sender, form)))
                    if len(posted) == _AHEAD:
                        break
                if not posted:
                    return
                rank = self._rank_of(posted[0][1])
                self._deliver(*posted.popleft())
        except BaseException as error:
            self._fail(self._links.ranks.lost(error, rank))

    def _posted(self, key: Key, sender: int, form: Form) -> tuple[list[Tensor], list[dist.Work]]:
        rank, tag = self._rank_of(sender), self._tag(key, sender)
        buffers = [torch.empty(size, dtype=torch.uint8) for size in form.buffers]
        works = [
            self._links.post(buffer, rank, place)
            for place, buffer in enumerate(buffers, tag + 2)
            if len(buffer)
        ]
        return buffers, works

    def _deliver(
        self, key: Key, sender: int, form: Form, buffers: list[Tensor], works: list[dist.Work]
    ) -> None:
        for work in works:
            work.wait()
        micro_batch = key[2]
        message = unpack(form, buffers, self._recordings[micro_batch])
        self._mailboxes.send(sender, key[1], key, message)


def _changed(stage: int, before: Form, now: Form) -> str:
    pairs = [(a, b) for a, b in zip(before.leaves, now.leaves, strict=False) if a != b]
    shown = f": {pairs[0][0]} before, {pairs[0][1]} now" if pairs else ""
    return (
        f"stage {stage} passes tensors of another form to another rank than in an earlier step whose mini-batch had "
        f"the same shapes{shown}. Under torchrun the shapes between stages are to follow from those of the mini-batch: "
        "put the layers before and behind into one stage (pipepart.plan(..., colocate=...))"
    )


def _run(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _wait_for_sends(sends: SimpleQueue[Any]) -> None:
    """Release what is sent, every few milliseconds: waking this thread for each message would slow down the workers."""
    while True:
        one = sends.get()
        while one is not None:
            work, _, fail, rank, ranks = one
            try:
                work.wait()
            except BaseException as error:
                fail(ranks.lost(error, rank))
            del one, work, _, fail, ranks
            if sends.empty():
                time.sleep(_RELEASE_SECONDS)
            if sends.empty():
                break
            one = sends.get()
        else:
            return


def _end(queues: Sequence[SimpleQueue[Any]]) -> None:
    for queue in queues:
        queue.put(None)
