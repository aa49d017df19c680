"""Ranks: the processes of one pipeline under torchrun, and what they tell each other beside the messages of stages.

::

    caller's thread      exchange(mine) ──▶ everybody's, at the begin and the end of every call, by the hub
    control thread       runs the collectives, so that the caller's wait can be ended
    hub's thread         hears of failures of other ranks, and answers what this rank is doing

A rank that fails tells the story to all and then leaves: the others end at once, with that story. A rank that is killed
says nothing, and the hub tells that it is gone. Whoever still waits for a message of it, in a thread that Python cannot
interrupt, is woken by :func:`break_connections`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from .clock import offset_to_rank_0
from .doing import Doing, waits_in_vain
from .exchange import Done, Exchange
from .failure import RankError, has_closed, is_lost, raised_on, told
from .hub import Channel, Hub, Message
from .torchrun import initialize, under_torchrun
from .watch import break_connections

_STORY_SECONDS = 3.0  # for the story behind a broken connection to arrive
_ANSWER_SECONDS = 1.5  # for ranks to say what they are doing
_LEAVE_SECONDS = 1.0  # for the control thread to leave a collective whose connections are broken
_LONGEST = timedelta(days=30)  # the hub finds lost ranks, not the timeout of a group

Listener = Callable[[BaseException], None]


class Ranks:
    """The processes that run one pipeline together. All make it at the same point of their scripts.

    Args:
        hub: of the process.
        timeout: seconds in which nothing happens on any rank, after which a wait for other ranks ends; None for no
            limit.

    Attributes:
        rank: of this process.
        size: the number of processes.
        group: of the messages between stages.
        closed: why nothing can be sent any more; "" if it can.
        failure: what a call raises, once a rank has failed.
        midway: whether this rank is in a call that all ranks have begun. It cannot fail there alone.
        place: where the next wait for the others is, for messages.

    Raises:
        TimeoutError: not all ranks make it, within the time that the process group waits for a rank.
    """

    def __init__(self, hub: Hub, timeout: float | None = None) -> None:
        self.rank, self.size = hub.rank, hub.size
        self.closed = ""
        self.failure: BaseException | None = None
        self.midway = False
        self.place = "the making of the pipeline"
        self._timeout = timeout
        self._lock = threading.RLock()
        self._listener: Listener | None = None
        self._doing: Callable[[], Doing] | None = None
        self._waits = False
        self._since = time.monotonic()
        self._left: dict[int, Message] = {}
        self._answers: SimpleQueue[Message] = SimpleQueue()
        self._surveys = itertools.count()
        self._groups: list[dist.ProcessGroup] = []
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._exchange = Exchange(self.rank, self.size)
        self._channel = hub.open(partial(_heard, weakref.ref(self)))
        weakref.finalize(self, _dropped, self._channel, self._jobs).atexit = False
        self._control_thread = threading.Thread(target=_run_jobs, args=(self._jobs,), daemon=True)
        self._control_thread.start()
        self.exchange(
            None, hub.store.timeout.total_seconds()
        )  # groups are waited for where nothing ends the wait
        self._control, self.group = self.new_group(), self.new_group()
        self.exchange(None)  # no rank goes on, and may fail alone, while others are still here

    def new_group(self, rows: Sequence[Sequence[int]] = ()) -> dist.ProcessGroup:
        """Return a new gloo group, whose waits end when a rank fails. All ranks call this.

        Args:
            rows: the ranks of each group of which this rank gets its own; none for one of all ranks.

        Raises:
            RankError: as :meth:`gather`.
        """
        rows = rows or [range(self.size)]
        made: list[Any] = []

        def make() -> None:
            made.extend(dist.new_group(list(row), backend="gloo", timeout=_LONGEST) for row in rows)

        self._apart(make, None, None)
        mine = next(group for group, row in zip(made, rows, strict=True) if self.rank in row)
        self._groups.append(mine)
        return mine

    def connect(
        self, rounds: Sequence[Sequence[tuple[int, int]]], backend: str, device: torch.device
    ) -> dict[tuple[int, int], dist.ProcessGroup]:
        """Connect pairs of ranks, each by a group of its own, with a first message. All ranks call this.

        Args:
            rounds: directed edges; in each round a rank is in one at most.
            backend: of the groups.
            device: of this rank's messages.

        Returns:
            The groups of the edges that this rank is in.

        Raises:
            RankError, TimeoutError: as :meth:`gather`.
        """
        made: dict[tuple[int, int], Any] = {}

        def make() -> None:
            edges = [edge for edges in rounds for edge in edges]
            for edge in edges:
                group = dist.new_group(list(edge), backend=backend, timeout=_LONGEST)
                if self.rank in edge:
                    made[edge] = group
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            for edge in (edge for edge in edges if edge in made):
                is_sender, group = edge[0] == self.rank, made[edge]
                move = group.send if is_sender else group.recv
                move([first], 1 - group.rank(), 0).wait()
            first.cpu()  # waits for the device

        self._apart(make, None, self._timeout)
        self._groups += made.values()
        return made

    def run(self, together: Callable[[], Any]) -> None:
        """Run on another thread what all ranks do together; a failure elsewhere ends the wait.

        Raises:
            RankError, TimeoutError: as :meth:`gather`.
        """
        self._apart(together, None, self._timeout)

    def gather(self, mine: Any, patient: bool = False) -> list[Any]:
        """Return what every rank has given, by rank. All ranks call this at the same point.

        Args:
            mine: given by this rank.
            patient: wait for the others without the timeout.

        Raises:
            RankError: another rank has failed or is lost.
            TimeoutError: not all ranks have come within the timeout.
        """
        found: list[Any] = [None] * self.size
        return self._apart(
            lambda: dist.all_gather_object(found, mine, group=self._control),
            found,
            None if patient else self._timeout,
        )

    def exchange(self, mine: Any, timeout: float | None = None) -> list[Any]:
        """Return what every rank has given, by rank, as :meth:`gather`, for short values that JSON has.

        Each rank sends its value to rank 0 by the hub, which sends back all of them. That wakes fewer threads than a
        collective.

        Args:
            mine: given by this rank.
            timeout: seconds to wait for the others, in place of the pipeline's timeout.

        Raises:
            RankError, TimeoutError: as :meth:`gather`.
        """

        self._wait_for(partial(self._exchange.begin, self._channel, mine), timeout or self._timeout)
        return self._exchange.found

    def broadcast(
        self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Give a contiguous CPU tensor of one rank to all others, or to those of a group, in place.

        Raises:
            RankError, TimeoutError: as :meth:`gather`.
        """
        return self._apart(
            lambda: dist.broadcast(tensor, source, group=group or self._control), tensor, self._timeout
        )

    def clock_offset(self) -> float:
        """Return the seconds to add to ``time.perf_counter`` of this rank to have that of rank 0. All ranks call this.

        Raises:
            RankError, TimeoutError: as :meth:`gather`.
        """
        found: list[float] = []
        self._apart(
            lambda: found.append(offset_to_rank_0(self.rank, self.size, self._control)), None, self._timeout
        )
        return found[0]

    def check(self) -> None:
        """Raise if a rank has failed.

        Raises:
            RankError, TimeoutError: it has.
        """
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def telling(self, listener: Listener, doing: Callable[[], Doing] | None = None) -> Iterator[None]:
        """Within the block, call ``listener`` on another thread when another rank fails.

        ``doing`` says what this rank does meanwhile; it is called on another thread.
        """
        with self._lock:
            before = self._listener, self._doing
            self._listener, self._doing = listener, doing
            known = self.failure
        if known is not None:
            listener(known)
        try:
            yield
        finally:
            with self._lock:
                self._listener, self._doing = before
                self._since = time.monotonic()

    def tell(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed; the first failure of any rank is the one that counts."""
        story = told(error)
        if isinstance(error, TimeoutError):
            story |= {"late": str(error), "notes": list(getattr(error, "__notes__", ()))}
        with self._lock:
            if self.failure is not None or self.closed:
                return
            self.failure = RankError(f"an earlier call has failed: {story['what']}")
        self._channel.send({"kind": "failure", "rank": self.rank, **story})
        self._abort()

    def lost(self, error: BaseException, peer: int | None = None) -> BaseException:
        """Return the error for a broken connection: the story of the rank that failed, if there is one.

        Args:
            error: of the connection.
            peer: the rank at its other end, if that is known.
        """
        if not isinstance(error, RuntimeError):
            return error  # not of the connection
        end = time.monotonic() + _STORY_SECONDS
        while self.failure is None and not self.closed and time.monotonic() < end:
            time.sleep(0.01)
        if self.failure is not None:
            return self.failure
        which = "another rank" if peer is None else f"rank {peer}"
        found = RankError(self.closed or f"the connection of rank {self.rank} to {which} broke: {error}")
        found.__cause__ = error
        self.tell(found)
        return found

    def survey(self, timeout: float) -> tuple[float, TimeoutError]:
        """Ask all ranks what they do, after a wait of ``timeout`` seconds.

        Returns:
            The seconds since anything began or ended on any rank, and the error that says who waits for whom.
        """
        number = next(self._surveys)
        self._channel.send({"kind": "ask", "number": number})
        found = {self.rank: self._now()}
        end = time.monotonic() + _ANSWER_SECONDS
        with suppress(Empty):
            while len(found) < self.size:
                answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
                if answer["number"] == number:
                    found[answer["from"]] = Doing(*answer["doing"])
        idle = min(one.idle for one in found.values())
        return idle, waits_in_vain(timeout, self.size, found, self._left)

    def close(self, reason: str) -> None:
        """Send nothing from now on, and end the threads. Closing twice does nothing."""
        if self.closed:
            return
        self.closed = reason
        handled = sys.exc_info()[1]  # the script may close the pipeline because of an error of its own
        story = told(handled) if handled else {}
        during = f", while it handled {story['what']}" if handled else ""
        if in_order := self.failure is None and not self.midway:  # else threads may still wait in them
            self._jobs.put(partial(_destroy, self._groups))
        _dropped(self._channel, self._jobs, f"{reason} there{during}", story.get("traceback", ""))
        if in_order and threading.current_thread() is not self._control_thread:
            # A script that ends while gloo ends a group would abort.
            self._control_thread.join(_LEAVE_SECONDS)

    def heard(self, message: Message) -> None:
        """Called on the hub's thread with each message of another rank."""
        kind, rank = message["kind"], message.get("rank", message["from"])
        if kind == "failure":
            self._fail(raised_on(rank, message))
        elif kind == "lost":
            self._fail(is_lost(rank))
        elif kind == "closed":
            with self._lock:
                first = self._left.setdefault(rank, message)  # a script may close the pipeline before it ends
                ends = self._waits and first["calls"] < self._channel.calls
            if ends:
                self._fail(has_closed(rank, first))
        elif kind == "part":
            self._exchange.give(rank, message["value"])
        elif kind == "all":
            self._exchange.end(message["values"])
        elif kind == "ask":
            self._channel.send(
                {"kind": "answer", "number": message["number"], "doing": self._now(), "to": message["from"]}
            )
        else:
            self._answers.put(message)

    def _now(self) -> Doing:
        with self._lock:
            doing, waits, idle = self._doing, self._waits, time.monotonic() - self._since
        if doing is not None:
            return doing()
        where = (
            f"waits for the other ranks at {self.place}" if waits else "is in the script, between two calls"
        )
        return Doing(idle, [f"{where}, for {idle:.3g} s"], [])

    def _fail(self, error: BaseException) -> None:
        """Another rank has failed."""
        with self._lock:
            if self.failure is not None or self.closed:
                return
            self.failure = error
            listener = self._listener
        if listener is not None:
            listener(error)
        self._abort()

    def _abort(self) -> None:
        for group in list(self._groups):
            break_connections(group)

    def _apart(self, collective: Callable[[], Any], result: Any, timeout: float | None) -> Any:
        """Run a collective on the control thread."""
        left = threading.Event()
        left.set()

        def start(done: Done) -> None:
            def run() -> None:
                try:
                    collective()
                except BaseException as error:
                    done.put(error)
                else:
                    done.put(None)
                finally:
                    left.set()

            left.clear()
            self._jobs.put(run)

        try:
            self._wait_for(start, timeout)
        except BaseException:
            left.wait(_LEAVE_SECONDS)  # a script that ends while gloo still waits there would abort
            raise
        return result

    def _wait_for(self, start: Callable[[Done], None], timeout: float | None) -> None:
        """Begin what all ranks do at this point, and wait for its end; a failure elsewhere ends the wait."""
        if self.closed:
            raise RuntimeError(self.closed)
        self.check()
        done: Done = SimpleQueue()
        try:
            with self._lock:
                self._waits, self._since = True, time.monotonic()
                self._channel.calls += 1
                gone = [rank for rank, one in self._left.items() if one["calls"] < self._channel.calls]
            with self.telling(done.put):
                if gone:
                    self._fail(has_closed(gone[0], self._left[gone[0]]))
                else:
                    start(done)
                error = self._waited(done, timeout)
        except BaseException as interrupt:  # among them a timeout
            self.tell(interrupt)
            raise
        finally:
            self._waits = False
        if error is not None:
            raise error if error is self.failure else self.lost(error)

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


def _run_jobs(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _heard(this: weakref.ref[Ranks], message: Message) -> None:
    if (ranks := this()) is not None:
        ranks.heard(message)


def _dropped(
    channel: Channel,
    jobs: SimpleQueue[Any],
    why: str = "its pipeline was dropped there",
    story: str = "",
) -> None:
    """A pipeline is closed, or nobody has it any more."""
    jobs.put(None)
    channel.close({"why": why, "traceback": story})


def _destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    """End the threads and connections that gloo has for each group."""
    for group in groups:
        dist.destroy_process_group(group)
