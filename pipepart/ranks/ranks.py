"""Ranks: collectives, value exchange and failure reports between the processes of one pipeline.

::

    caller's thread             exchange(value) ──▶ those of all ranks, at the begin and the end of a call, by the log
    thread of a collective      runs it, so that the caller's wait can be ended
    log's thread                hears of failures of other ranks, and answers what this rank is doing

A rank that fails reports the exception to all and then leaves: the others raise it at once. A rank that is killed says
nothing, and those that watch it report that it is lost. Whoever still waits for a message of it, in a thread that
Python cannot interrupt, is woken by :func:`break_connections`.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .failure import (
    RankError,
    broke,
    has_closed,
    is_lost,
    is_out_of_memory,
    remote_exception,
    serialize_exception,
)
from .groups import Edge, Groups, groups_of_pairs, own_group
from .log import Channel, Message, MessageLog
from .status import RankStatus, timeout_error
from .torchrun import initialize, under_torchrun
from .waiting import Done, begin, waits_in_torch

_REPORT_SECONDS = 3.0  # for the report of a failure to arrive after a broken connection
_ANSWER_SECONDS = 1.5  # for ranks to say what they are doing
_LEAVE_SECONDS = 1.0  # for a collective whose connections are broken to end

T = TypeVar("T")
Listener = Callable[[BaseException], None]


class Ranks:
    """The processes that run one pipeline. All create it at the same point of their scripts.

    All ranks call the methods that wait for others at the same point. These raise RankError if a rank has failed or is
    lost, and TimeoutError if not all come within the timeout.

    Args:
        log: of the process.
        timeout: seconds in which nothing happens on any rank, after which a wait for other ranks ends; None for no
            limit.

    Attributes:
        rank: of this process.
        size: the number of processes.
        groups: of the messages to lower ranks, and of those to higher ranks. In one group for both, what arrives while
            a message is sent would make gloo's thread poll until that is sent, which takes a core.
        closed: why nothing can be sent any more; "" if it can.
        failure: what a call raises, once a rank has failed.
        midway: whether this rank is in a call that all ranks have begun. It cannot fail there alone.
        place: where the next wait for the others is, for messages.

    Raises:
        TimeoutError: not all ranks make it, within the time that the process group waits for a rank.
    """

    def __init__(self, log: MessageLog, timeout: float | None = None) -> None:
        self.rank, self.size = log.rank, log.size
        self.closed = ""
        self.failure: BaseException | None = None
        self.midway = False
        self.place = "the making of the pipeline"
        self._timeout = timeout
        self._lock = threading.RLock()
        self._listener: Listener | None = None
        self._status: Callable[[], RankStatus] | None = None
        self._waits = False
        self._since = time.monotonic()
        self._left: dict[int, Message] = {}
        self._waiting_in = Groups()
        self._exchanges = 0
        self._values: list[Any] = []  # of the last exchange
        self._exchanged: Done = SimpleQueue()
        self._survey = ""  # the last one
        self._statuses: dict[int, RankStatus] = {}  # the answers to it
        self._patience: float = log.store.timeout.total_seconds()
        self._channel = log.open(partial(_heard, weakref.ref(self)))
        weakref.finalize(self, _dropped, self._channel).atexit = False
        # Nothing ends a wait for a new group: none is made before all ranks are here.
        self.exchange(None, patient=True)
        self.groups = self.new_group(), self.new_group()
        self._control = self.groups[0]  # collectives run between steps, when no messages are on their way
        self.exchange(None)  # no rank goes on, and may fail alone, while others are still here

    def new_group(
        self, rows: Sequence[Sequence[int]] = (), backend: str = "gloo", lasting: bool = False
    ) -> dist.ProcessGroup:
        """Return a new group, whose waits end when a rank fails.

        Args:
            rows: the ranks of each group of which this rank gets its own; none for one of all ranks.
            backend: of torch.distributed.
            lasting: whether the group can be used after the pipeline is closed.
        """
        make = partial(own_group, self.rank, rows or [range(self.size)], backend)
        group = self.run(make, patient=True)
        self._waiting_in.add([group], lasting)
        return group

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Within the block, the caller's code may make groups: a failure of another rank ends waits in these, too."""
        try:
            with self._waiting_in.adopting():
                self.check()
                yield
        except BaseException as error:
            lost = self.lost(error) if broke(error) else error
            self.tell(lost)
            if lost is error:
                raise
            raise lost from None

    def connect(
        self, rounds: Sequence[Sequence[Edge]], backend: str, device: torch.device
    ) -> dict[Edge, dist.ProcessGroup]:
        """Connect pairs of ranks as :func:`groups_of_pairs`, and return the groups of the edges of this rank."""
        make = partial(groups_of_pairs, self.rank, rounds, backend, device)
        groups: dict[Edge, dist.ProcessGroup] = self.run(make)
        self._waiting_in.add(groups.values())
        return groups

    def run(self, collective: Callable[[], T], patient: bool = False, of_all: bool = True) -> T:
        """Run a collective of all or of some ranks on another thread, and return its result.

        The failure of another rank ends the wait. ``patient`` waits without a timeout.
        """
        result: list[T] = []
        threads: list[threading.Thread] = []

        def start(done: Done) -> None:
            threads.append(begin(lambda: result.append(collective()), done))

        try:
            self._wait_for(start, None if patient else self._timeout, of_all)
        except BaseException:
            for thread in threads:  # a script that ends while gloo still waits would abort
                thread.join(_LEAVE_SECONDS)
            raise
        return result[0]

    def gather(self, mine: Any, patient: bool = False) -> list[Any]:
        """Return the values of all ranks, in rank order; ``patient`` waits without a timeout, as for files."""

        def collective() -> list[Any]:
            gathered: list[Any] = [None] * self.size
            dist.all_gather_object(gathered, mine, group=self._control)
            return gathered

        return self.run(collective, patient)

    def exchange(self, mine: Any, patient: bool = False) -> list[Any]:
        """Return the values of all ranks, like :meth:`gather`, for short JSON values.

        They go by the store, without a collective, which would wake more threads. ``patient`` waits as long as
        torch.distributed does, in place of the pipeline's timeout.
        """

        def start(done: Done) -> None:
            self._exchanges, self._exchanged = self._exchanges + 1, done
            self._channel.exchange(self._exchanges, mine)

        self._wait_for(start, self._patience if patient else self._timeout)
        return self._values

    def broadcast(
        self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Broadcast a contiguous CPU tensor of one rank to all ranks, or to those of a group, in place."""
        send = partial(dist.broadcast, tensor, source, group=group or self._control)
        self.run(send, of_all=group is None)
        return tensor

    def check(self) -> None:
        """Raise the failure of a rank, if any has failed."""
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def telling(self, listener: Listener, status: Callable[[], RankStatus] | None = None) -> Iterator[None]:
        """Within the block, call ``listener`` on another thread when another rank fails.

        ``status`` returns what this rank does meanwhile; it is called on another thread.
        """
        with self._lock:
            before = self._listener, self._status
            self._listener, self._status = listener, status
            known = self.failure
        if known is not None:
            listener(known)
        try:
            yield
        finally:
            with self._lock:
                self._listener, self._status = before
                self._since = time.monotonic()

    def tell(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed; the first failure of any rank is the one that counts."""
        report = serialize_exception(error)
        if isinstance(error, TimeoutError):
            report |= {"late": str(error), "notes": list(getattr(error, "__notes__", ()))}
        with self._lock:
            if self.failure is not None or self.closed:
                return
            self.failure = RankError(f"an earlier call has failed: {report['what']}")
        self._channel.send({"kind": "failure", "rank": self.rank, **report})
        self._waiting_in.break_connections()

    def lost(self, error: BaseException, peer: int | None = None) -> BaseException:
        """Return the error for a broken connection: the failure that a rank has reported, if any.

        An error that does not come from a connection, such as out of memory, is returned as it is. ``peer`` is the rank
        at the other end, if that is known.
        """
        if not isinstance(error, RuntimeError) or is_out_of_memory(error):
            return error
        end = time.monotonic() + _REPORT_SECONDS
        while self.failure is None and not self.closed and time.monotonic() < end:
            time.sleep(0.01)
        if self.failure is not None:
            return self.failure
        which = "another rank" if peer is None else f"rank {peer}"
        error_here = RankError(self.closed or f"the connection of rank {self.rank} to {which} broke: {error}")
        error_here.__cause__ = error
        self.tell(error_here)
        return error_here

    def survey(self, timeout: float) -> tuple[float, TimeoutError]:
        """Ask all ranks for their status, after a wait of ``timeout`` seconds.

        Returns the seconds since anything began or ended on any rank, and the error that says who waits for whom.
        """
        end = time.monotonic() + _ANSWER_SECONDS
        self._survey, self._statuses = f"{self.rank} {end}", {self.rank: self._now()}
        self._channel.send({"kind": "ask", "survey": self._survey})
        while len(self._statuses) < self.size and time.monotonic() < end:
            time.sleep(0.01)
        statuses = dict(self._statuses)
        idle = min(status.idle for status in statuses.values())
        return idle, timeout_error(timeout, self.size, statuses, self._left)

    def close(self, reason: str) -> None:
        """Send nothing from now on, and end the threads. Closing twice does nothing."""
        if self.closed:
            return
        self.closed = reason
        handled = sys.exc_info()[1]  # the script may close the pipeline because of an error of its own
        report = serialize_exception(handled) if handled else {}
        during = f", while it handled {report['what']}" if handled else ""
        in_order = self.failure is None and not self.midway  # else threads may still wait in the groups
        # First, so that a peer whose connection breaks knows why.
        self._channel.close({"why": f"{reason} there{during}", "traceback": report.get("traceback", "")})
        if in_order:  # a script that ends while gloo ends a group would abort
            begin(self._waiting_in.destroy, SimpleQueue()).join(_LEAVE_SECONDS)

    def heard(self, message: Message) -> None:
        """Called on the log's thread with each message of another rank."""
        kind, rank = message["kind"], message.get("rank", message["from"])
        if kind == "failure":
            self._fail(remote_exception(rank, message))
        elif kind == "lost":
            self._fail(is_lost(rank))
        elif kind == "closed":
            with self._lock:
                first = self._left.setdefault(rank, message)  # a script may close the pipeline before it ends
                ends = self._waits and first["calls"] < self._channel.calls
            if ends:
                self._fail(has_closed(rank, first))
        elif kind == "all":
            if message["number"] == self._exchanges:  # not one that this rank has given up
                self._values = message["values"]
                self._exchanged.put(None)
        elif kind == "ask":
            self._channel.send({**message, "kind": "answer", "status": self._now()})
        elif message["survey"] == self._survey:  # an answer, and not one that comes too late
            self._statuses[rank] = RankStatus(*message["status"])

    def _now(self) -> RankStatus:
        with self._lock:
            status, waits, idle = self._status, self._waits, time.monotonic() - self._since
        if status is not None:
            return status()
        where = (
            f"waits for the other ranks at {self.place}" if waits else "is in the script, between two calls"
        )
        return RankStatus(idle, [f"{where}, for {idle:.3g} s"], [])

    def _fail(self, error: BaseException) -> None:
        """Another rank has failed."""
        with self._lock:
            if self.failure is not None or self.closed:
                return
            self.failure = error
            listener = self._listener
        with waits_in_torch():  # before the caller's thread hears of it, and may end the script
            if listener is not None:
                listener(error)
            self._waiting_in.break_connections()

    def _wait_for(self, start: Callable[[Done], None], timeout: float | None, of_all: bool = True) -> None:
        """Begin what all ranks do at this point, or some of them, and wait for its end.

        A failure elsewhere ends the wait. What only some ranks do does not count as a call: by their numbers of calls
        ranks tell whether one that has closed its pipeline has made theirs.
        """
        if self.closed:
            raise RuntimeError(self.closed)
        self.check()
        done: Done = SimpleQueue()
        try:
            with self._lock:
                self._waits, self._since = True, time.monotonic()
                self._channel.calls += of_all
                gone = [
                    rank for rank, departure in self._left.items() if departure["calls"] < self._channel.calls
                ]
            with self.telling(done.put):
                if gone:
                    self._fail(has_closed(gone[0], self._left[gone[0]]))
                else:
                    start(done)
                error = self._waited(done, timeout)
            if error is not None and error is not self.failure:
                # While this rank counts as waiting: a peer that has closed is the reason.
                error = self.lost(error)
        except BaseException as interrupt:  # among them a timeout
            self.tell(interrupt)
            raise
        finally:
            self._waits = False
        if error is not None:
            raise error

    def _waited(self, done: Done, timeout: float | None) -> BaseException | None:
        left = timeout
        while True:
            try:
                return done.get(timeout=left)
            except Empty:
                assert timeout is not None
                idle, late = self.survey(timeout)
                if idle >= timeout and done.empty():
                    raise late from None
                left = max(0.0, timeout - idle)


def join_ranks(timeout: float | None = None) -> Ranks | None:
    """Return the ranks of a new pipeline; None in one process. Initializes torch.distributed if nobody has."""
    return Ranks(initialize(), timeout) if under_torchrun() else None


def _heard(this: weakref.ref[Ranks], message: Message) -> None:
    if (ranks := this()) is not None:
        ranks.heard(message)


def _dropped(channel: Channel) -> None:
    """Nobody has a pipeline any more."""
    channel.close({"why": "its pipeline was dropped there", "traceback": ""})
