"""Ranks: the processes of one pipeline under torchrun, and what they tell each other beside the messages of stages.

::

    caller's thread      gather(mine) ──▶ everybody's, at the begin and the end of every call
    control thread       runs the collectives, so that the caller's wait can be ended
    watcher thread       looks for the first failure of any rank in the store of the process group

A rank that fails puts the story into the store first and then leaves. So the others end at once, with that story. A
rank that is killed says nothing: its connections close, whoever waits for it fails and tells the rest.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ..cluster import initialize, under_torchrun

_POLL_SECONDS = 0.1  # between two looks into the store
_CLOCK_ROUNDS = 8
_STORY_SECONDS = 3.0  # for the story of a rank that was lost to arrive
_numbers = itertools.count()  # of the pipelines of this process, made in the same order on all ranks


class RankError(RuntimeError):
    """Another rank has failed, or is lost. Its traceback, if it sent one, is in a note."""


class Ranks:
    """The processes that run one pipeline together. All make it at the same point of their scripts.

    Args:
        timeout: seconds that a rank waits for the others at the begin and at the end of a call; None for no limit but
            that of the process group.

    Attributes:
        rank: of this process.
        size: the number of processes.
        group: of the messages between stages.
        closed: why nothing can be sent any more; "" if it can.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.closed = ""
        self._timeout = timeout
        self._control, self.group = _gloo_group(), _gloo_group()
        store: Any = dist.distributed_c10d._get_default_store()
        self._key = f"pipepart/{next(_numbers)}/failure"
        self._store = store.clone()
        self._failure: RankError | None = None
        self._lock = threading.Lock()
        self._listener: Callable[[BaseException], None] | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = threading.Event()
        threads = (
            threading.Thread(target=_run_jobs, args=(self._jobs,), name="pipepart-control", daemon=True),
            threading.Thread(
                target=_watch,
                args=(weakref.ref(self), store.clone(), self._key, self._closed),
                name="pipepart-watcher",
                daemon=True,
            ),
        )
        for thread in threads:
            thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank has given, by rank. All ranks call this at the same point.

        Raises:
            RankError: another rank has failed or is lost.
            TimeoutError: not all ranks have come within the timeout.
        """
        found: list[Any] = [None] * self.size
        return self._apart(lambda: dist.all_gather_object(found, mine, group=self._control), found)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place.

        Raises:
            RankError, TimeoutError: as :meth:`gather`.
        """
        return self._apart(lambda: dist.all_reduce(tensor, group=self._control), tensor)

    def broadcast(
        self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Give a contiguous CPU tensor of one rank to all others, or to those of a group, in place.

        Raises:
            RankError, TimeoutError: as :meth:`gather`.
        """
        return self._apart(lambda: dist.broadcast(tensor, source, group=group or self._control), tensor)

    def clock_offset(self) -> float:
        """Return the seconds to add to ``time.perf_counter`` of this rank to have that of rank 0. All ranks call this.

        Each rank asks rank 0 for the time, as NTP does (RFC 5905), and takes the answer of the shortest round trip: the
        error is at most half of that.

        Raises:
            RankError, TimeoutError: as :meth:`gather`.
        """
        found: list[float] = []
        self._apart(lambda: found.append(_offset(self.rank, self.size, self._control)), None)
        return found[0]

    def check(self) -> None:
        """Raise if a rank has failed.

        Raises:
            RankError: it has.
        """
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def telling(self, listener: Callable[[BaseException], None]) -> Iterator[None]:
        """Within the block, call ``listener`` on another thread when another rank fails."""
        with self._lock:
            self._listener = listener
            known = self._failure
        if known is not None:
            listener(known)
        try:
            yield
        finally:
            with self._lock:
                self._listener = None

    def tell(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed; the first failure of any rank is the one that counts."""
        if error is self._failure:
            return
        text = "".join(traceback.format_exception(error))
        story = {"rank": self.rank, "what": f"{type(error).__name__}: {error}", "traceback": text}
        with suppress(Exception):  # the store may be gone with the rank that it is on
            self._store.compare_set(self._key, "", json.dumps(story))

    def lost(self, error: BaseException, peer: int | None = None) -> BaseException:
        """Return the error for a broken connection: the story of the rank that failed, if it comes.

        Args:
            error: of the connection.
            peer: the rank at its other end, if that is known.
        """
        end = time.monotonic() + _STORY_SECONDS
        while self._failure is None and time.monotonic() < end:
            time.sleep(0.01)
        if self._failure is not None:
            return self._failure
        which = "a rank" if peer is None else f"rank {peer}"
        found = RankError(
            f"{which} is lost: its connection to rank {self.rank} broke, and it left no message, as a process that is "
            "killed does. Start the job again from the last checkpoint"
        )
        found.__cause__ = error
        self.tell(found)
        self._failure = found
        return found

    def close(self, reason: str) -> None:
        """Send nothing from now on, and end the threads. Closing twice does nothing."""
        if not self.closed:
            self.closed = reason
            self._closed.set()
            self._jobs.put(None)

    def failed(self, story: str) -> None:
        """Called by the watcher: a rank has failed."""
        found = json.loads(story)
        if found["rank"] == self.rank:
            return
        error = RankError(f"rank {found['rank']} failed: {found['what']}")
        error.add_note(f"pipepart: on rank {found['rank']}:\n{found['traceback'].rstrip()}")
        with self._lock:
            self._failure = error
            listener = self._listener
        if listener is not None:
            listener(error)

    def _apart(self, collective: Callable[[], Any], result: Any) -> Any:
        """Run a collective on the control thread; a failure elsewhere ends the wait."""
        if self.closed:
            raise RuntimeError(self.closed)
        self.check()
        done: SimpleQueue[BaseException | None] = SimpleQueue()

        def run() -> None:
            try:
                collective()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

        with self.telling(done.put):
            self._jobs.put(run)
            try:
                error = done.get(timeout=self._timeout)
            except Empty:
                late = TimeoutError(
                    f"rank {self.rank} has waited {self._timeout:g} s, the pipeline's timeout, for the other ranks to "
                    "make the same call: do all of them call step, evaluate and so on equally often?"
                )
                self.tell(late)
                self._failure = RankError(f"an earlier call has failed: {late}")
                raise late from None
        if error is None:
            return result
        raise error if isinstance(error, RankError) else self.lost(error)


def join_ranks(timeout: float | None = None) -> Ranks | None:
    """Return the ranks of a new pipeline; None in one process. Initializes torch.distributed if nobody has."""
    if not under_torchrun():
        return None
    initialize()
    return Ranks(timeout)


def _offset(rank: int, size: int, group: dist.ProcessGroup) -> float:
    moment = torch.empty(1, dtype=torch.float64)
    if rank == 0:
        for _ in range((size - 1) * _CLOCK_ROUNDS):
            asking = dist.recv(moment, group=group)
            dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), asking, group=group)
        return 0.0
    answers = []
    for _ in range(_CLOCK_ROUNDS):
        sent = time.perf_counter()
        dist.send(moment, 0, group=group)
        dist.recv(moment, 0, group=group)
        back = time.perf_counter()
        answers.append((back - sent, float(moment) - (sent + back) / 2))
    return min(answers)[1]


def _gloo_group() -> dist.ProcessGroup:
    """Return a new group of all processes."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _run_jobs(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _watch(this: weakref.ref[Ranks], store: Any, key: str, closed: threading.Event) -> None:
    """Ask the store for a failure of any rank, until the pipeline is closed or gone."""
    while not closed.wait(_POLL_SECONDS):
        try:
            story = store.get(key).decode() if store.check([key]) else None
        except Exception:  # the store is gone: broken connections will tell
            return
        ranks = this()
        if ranks is None:
            return
        if story is not None:
            ranks.failed(story)
            return
        del ranks
