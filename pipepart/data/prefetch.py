"""Prefetching: a thread loads the next mini-batches and copies them to their devices while one trains.

::

    thread of the pass                          the caller's thread
    wait for room ─▶ next(loader) ─▶ copy ──▶ made ──▶ take ──▶ pipe.step
         ▲                                              │
         └───────────────────── room ◀──────────────────┘

The threads share these two queues and nothing else. A pass ends when a last entry is put into both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

from ..workers.forks import FORKED, listen_for_forks
from ..workers.modes import Modes
from .copy_ahead import Copied, CopyAhead

_PATIENCE_SECONDS = 1.0  # for a loader that is at work when its pass ends; the thread ends when it returns


class Passes:
    """The passes over loaders that go on for a pipeline."""

    def __init__(self) -> None:
        listen_for_forks(self)
        self.ended = ""
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[_Pass] = weakref.WeakSet()

    def begin(self, loader: Iterable[Any], copy: CopyAhead, depth: int) -> _Pass:
        """Starts a pass, whose thread holds nothing of the pipeline.

        Raises:
            RuntimeError: the pipeline is closed.
        """
        made = _Pass(iter(loader), copy, depth)  # the loader may draw a seed: on this thread, as without
        with self._lock:
            if self.ended:
                raise RuntimeError(self.ended)
            self._all.add(made)
        made.start()
        return made

    def end(self, reason: str) -> None:
        """Ends all passes and refuses further ones for ``reason``."""
        with self._lock:
            self.ended = reason
            passes = list(self._all)
        for one in passes:
            one.end(reason)

    def forked(self) -> None:
        """In a forked process there are no threads that load."""
        self.ended = FORKED
        self._lock = threading.Lock()
        for one in list(self._all):
            one.end(FORKED)


class Prefetch:
    """A loader whose mini-batches are loaded and copied to their devices ahead of time. Yields what the loader yields.

    Each ``for`` is a new pass over the loader, on a thread of its own that ends with the pass. A loader that does not
    return is given a second when its pass ends. A loader that draws from a global random generator in this process
    competes with layers that draw: give it a generator or workers of its own.

    Args:
        loader: an iterable of mini-batches: tensors, or nests of tensors.
        copy: copies a mini-batch to its devices.
        passes: those of the pipeline.
        depth: mini-batches that are loaded ahead, at most.

    Raises:
        TypeError: ``loader`` is no iterable.
        ValueError: ``depth`` is below 1.
        RuntimeError: the pipeline is closed.
    """

    def __init__(self, loader: Iterable[Any], copy: CopyAhead, passes: Passes, depth: int) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(f"prefetch takes an iterable of mini-batches, got a {type(loader).__name__}")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth must be at least 1 mini-batch ahead, got {depth!r}")
        if passes.ended:
            raise RuntimeError(passes.ended)
        self._loader = loader
        self._copy = copy
        self._passes = passes
        self._depth = depth

    def __iter__(self) -> Iterator[Any]:
        going = self._passes.begin(self._loader, self._copy, self._depth)
        try:
            while (made := going.take()) is not None:
                yield made.arrived()
                del made  # what has been trained is not held while the next is waited for
        finally:
            going.end("")

    def __len__(self) -> int:
        """The length of the loader, if it has one."""
        return len(self._loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch to the loader and its samplers, as far as they take it, as ``DistributedSampler`` does."""
        sampler = getattr(self._loader, "batch_sampler", None)
        listeners = [self._loader, getattr(self._loader, "sampler", None), sampler]
        listeners.append(getattr(sampler, "sampler", None))
        for listener in {id(one): one for one in listeners if hasattr(one, "set_epoch")}.values():
            listener.set_epoch(epoch)


class _Failed(NamedTuple):
    """An exception in the place of a mini-batch."""

    error: BaseException


class _Pass:
    """One pass over a loader: a thread, what it has made, and room for what it may make."""

    def __init__(self, batches: Iterator[Any], copy: CopyAhead, depth: int) -> None:
        self._room: SimpleQueue[None] = SimpleQueue()  # its puts are safe wherever a collector may run
        self._made: SimpleQueue[Copied | _Failed | None] = SimpleQueue()
        self._ended = False
        self._reason = ""
        self._modes = Modes.current()
        for _ in range(depth):
            self._room.put(None)
        self._thread = threading.Thread(
            target=self._work, args=([batches], copy), name="pipepart-prefetch", daemon=True
        )
        del batches

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self) -> Copied | None:
        """The next mini-batch; None behind the last.

        Raises:
            RuntimeError: the pipeline has been closed.
            BaseException: what the loader raised in the place of a mini-batch.
        """
        made = None if self._reason else self._made.get()
        if self._reason:
            raise RuntimeError(self._reason)
        if not isinstance(made, _Failed):
            self._room.put(None)
            return made
        try:
            raise made.error
        finally:
            del made  # else the traceback holds this frame and the frame the error

    def end(self, reason: str) -> None:
        """Ends the thread; waits for it, but not for long if the loader does not return."""
        self._reason = self._reason or reason
        self._ended = True
        self._room.put(None)
        self._made.put(None)
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(_PATIENCE_SECONDS)

    def _work(self, given: list[Iterator[Any]], copy: CopyAhead) -> None:
        batches = given.pop()  # the thread object keeps its arguments while it runs
        try:
            with self._modes.entered(), self._modes.autocasting():
                while not self._waited_in_vain():
                    try:
                        batch = next(batches)
                    except StopIteration:
                        break
                    self._made.put(copy(batch))
                    del batch
            self._made.put(None)
        except BaseException as error:
            self._made.put(_Failed(error))

    def _waited_in_vain(self) -> bool:
        """Whether the pass has ended when there is room."""
        self._room.get()
        return self._ended
