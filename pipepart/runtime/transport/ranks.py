"""Sends messages between stages of different processes with torch.distributed's point-to-point calls.

::

    rank 0                                               rank 1
                                                         receives posted ahead
    worker: F(0, k) ── send ──▶ pack ── gloo, tag of the key ──▶ worker waits, unpack ──▶ F(1, k)

The first step with some shapes sends the form of each message before its bytes. Both ends keep it, and the receiver
the order in which it used the messages. From then on only bytes are sent, and receives are posted ahead in that order.
A worker waits for its messages itself: no thread in between is woken for each of them.
A message between stages of one process goes through the transport inside.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedules import Kind, Schedule

from ...autograd import graph_cut
from ...autograd.in_place import VersionCounter, check_counters, sent_counters
from ...capture import Live, Recording
from ...input_error import InputTypeError
from ..failure.notes import PLACE, add_note
from .links import Fail, Links, Table
from .ordered import Entry
from .threads import Key, Stopped, Transport
from .wire import Form, buffers_for, pack, unpack

_AHEAD = 4  # receives that are posted before their messages are needed
_PARTS = 32  # tags of one message: the length of its form, the form, and its buffers
_HOST = torch.device("cpu")  # through its memory go messages of accelerators; a stage moves what it gets
_KINDS = (Kind.F, Kind.B, Kind.REDUCE_GRAD)  # of keys; a shared parameter has its number


class RankTransport:
    """The messages of one step, to and from other processes.

    Args:
        inner: carries messages between stages of this process.
        schedule: of the step.
        links: to the other ranks.
        table: the messages of steps like this one.
        sender_of: returns the stage that sends a message.
        inputs: of the micro-batches, whose recordings live values belong to.
        fail: ends the step.
        awaiting: for each worker the key of the message that it waits for.
    """

    def __init__(
        self,
        inner: Transport,
        schedule: Schedule,
        links: Links,
        table: Table,
        sender_of: Callable[[Key], int],
        inputs: Sequence[Any],
        fail: Fail,
        awaiting: MutableSequence[Key | None],
    ) -> None:
        self._awaiting = awaiting
        self._inner = inner
        self._schedule = schedule
        self._worker_of = schedule.device_of
        self._links = links
        self._table = table
        self._sender_of = sender_of
        self._recordings: list[Recording | None] = [
            each.recording if isinstance(each, Live) else None for each in inputs
        ]
        self._fail = fail
        self._ahead: dict[int, _Ahead] = {}
        self._counters: dict[int, list[VersionCounter]] = {}  # of what was sent, by its stage
        self._ordered = links.ordered(table)

    def begin(self, worker: int) -> None:
        """Post the first receives of a worker, on its thread."""
        if self._ordered is not None:
            return
        known = self._table.rows.get(worker, ()) if self._table.complete else ()
        try:
            self._ahead[worker] = _Ahead(self._links, [entry for entry in known if not entry.is_sent])
        except RuntimeError as error:
            self._end_if_broken(error)
            raise

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        rank = self._rank_of(receiver)
        if rank == self._links.ranks.rank:
            self._inner.send(sender, receiver, key, message)
            return
        if key[0] is Kind.F:
            self._counters.setdefault(sender, []).extend(sent_counters(message))
        form, buffers = pack(
            graph_cut.move(message, _HOST if self._ordered is None else self._ordered.device)
        )
        known = self._table.sent.get(key)
        if known is None:
            known = self._announce(sender, rank, key, form)
        elif known.form != form:
            raise RuntimeError(_changed(sender, known.form, form))
        try:
            if self._ordered is not None:
                self._ordered.send(key, buffers)
                return
            for place, buffer in enumerate(buffers, known.tag + 2):
                if buffer.numel():
                    self._links.send(buffer, rank, place, self._fail)
        except RuntimeError as error:
            self._end_if_broken(error, rank)
            raise

    def recv(self, receiver: int, key: Key) -> Any:
        sender = self._sender_of(key)
        if (rank := self._rank_of(sender)) == self._links.ranks.rank:
            return self._inner.recv(receiver, key)
        if (worker := self._worker_of[receiver]) not in self._ahead:  # the calling thread works for it
            self.begin(worker)
        self._awaiting[worker] = key
        try:
            if not self._table.complete:
                tag = self._tag(key, sender)
                entry = Entry(key, self._announced(rank, tag), rank, tag, is_sent=False)
                self._table.rows.setdefault(worker, []).append(entry)
                self._ahead[worker].post(entry)
            form, buffers = (self._ordered or self._ahead[worker]).take(key)
        except RuntimeError as error:
            self._end_if_broken(error, rank)
            raise
        self._awaiting[worker] = None
        return unpack(form, buffers, self._recordings[key[2]])

    def end(self) -> None:
        """After the last action of a worker, on its thread."""
        try:
            if self._ordered is not None:
                self._ordered.finish()
        except RuntimeError as error:
            self._end_if_broken(error)
            raise

    def stop(self, error: BaseException) -> None:
        """Wake the workers of this rank that wait for messages, as the step has failed on another one."""
        if len(self._links.local) > 1:
            self._links.ranks.tell(error)

    def finish(self) -> None:
        """Called after a step that has not failed.

        Raises:
            RuntimeError: a stage has overwritten what it had sent, so that the receiver may have got a mixture.
        """
        for stage, counters in self._counters.items():
            try:
                check_counters(counters)
            except RuntimeError as error:
                add_note(error, f"{PLACE}stage {stage}, which sent its output to another rank")
                raise
        self._table.complete = True
        self._links.release(self._fail)

    def _rank_of(self, stage: int) -> int:
        return self._links.rank_of[self._worker_of[stage]]

    def _tag(self, key: Key, sender: int) -> int:
        """Return the first tag of a message, the same on both ranks; no other one in the step has it."""
        kind, stage, micro_batch = key[:3]
        kinds = _KINDS.index(kind) if isinstance(kind, Kind) else len(_KINDS) + kind
        stages = self._schedule.stages
        number = (kinds * stages + stage) * self._schedule.micro_batches + (micro_batch or 0)
        return (number * stages + sender) * _PARTS  # of 2**31 - 1 tags that gloo has

    def _end_if_broken(self, error: RuntimeError, rank: int | None = None) -> None:
        """End the step after an error of a connection, to a rank if it is known to which.

        Raises:
            Stopped: the connection has broken. Otherwise the error is another one, such as out of memory.
        """
        lost = self._links.ranks.lost(error, rank)
        if lost is not error:
            self._fail(lost)
            raise Stopped from None

    def _announce(self, sender: int, rank: int, key: Key, form: Form) -> Entry:
        """Send the form of a message."""
        if len(form.buffers) > _PARTS - 2:
            raise InputTypeError(
                f"stage {sender} passes {len(form.buffers)} tensors to another rank, at most {_PARTS - 2} can be passed"
            )
        tag = self._tag(key, sender)
        self._table.sent[key] = entry = Entry(key, form, rank, tag, is_sent=True)
        self._table.rows.setdefault(self._worker_of[sender], []).append(entry)
        header = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
        self._links.send(torch.tensor([len(header)]), rank, tag, self._fail)
        self._links.send(header, rank, tag + 1, self._fail)
        return entry

    def _announced(self, rank: int, tag: int) -> Form:
        """Receive the form of a message."""
        length = torch.empty(1, dtype=torch.int64)
        self._links.post(length, rank, tag).wait()
        header = torch.empty(int(length), dtype=torch.uint8)
        self._links.post(header, rank, tag + 1).wait()
        return pickle.loads(header.numpy().tobytes())


class _Ahead:
    """The messages of one worker whose receives are posted. Used by its thread.

    Those ``expected`` are in the order of their use: none in a first step, in which each is posted when it is known.
    """

    def __init__(self, links: Links, expected: Sequence[Entry]) -> None:
        self._links = links
        self._left: Iterator[Entry] = iter(expected)
        self._posted: dict[Key, tuple[Form, list[Tensor], list[dist.Work]]] = {}
        self._fill()

    def take(self, key: Key) -> tuple[Form, list[Tensor]]:
        """Wait for a message, behind further receives; return its form and buffers."""
        form, buffers, works = self._posted.pop(key)
        self._fill()
        for work in works:
            work.wait()
        return form, buffers

    def post(self, entry: Entry) -> None:
        """Post the receives of a message."""
        buffers = buffers_for(entry.form)
        works = [
            self._links.post(buffer, entry.rank, place)
            for place, buffer in enumerate(buffers, entry.tag + 2)
            if buffer.numel()
        ]
        self._posted[entry.key] = entry.form, buffers, works

    def _fill(self) -> None:
        for entry in islice(self._left, max(0, _AHEAD - len(self._posted))):
            self.post(entry)


def _changed(stage: int, before: Form, now: Form) -> str:
    pairs = [(a, b) for a, b in zip(before.leaves, now.leaves, strict=False) if a != b]
    shown = f": {pairs[0][0]} before, {pairs[0][1]} now" if pairs else ""
    return (
        f"stage {stage} passes tensors of another form to another rank than in an earlier step whose mini-batch had "
        f"the same shapes{shown}. Under torchrun the shapes between stages are to follow from those of the mini-batch: "
        "put the layers before and behind into one stage (pipepart.plan(..., colocate=...))"
    )
