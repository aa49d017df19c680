"""Prefetching: a thread loads the next mini-batches and copies them to their devices during training.

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

from ..forks import FORKED, listen_for_forks
from ..input_error import InputError, InputTypeError
from ..workers.modes import Modes
from .copy_ahead import Copied, CopyAhead

_PATIENCE_SECONDS = 1.0  # wait for a busy loader when its pass ends; the thread ends when the loader returns


class Passes:
    """The active passes over loaders of one pipeline."""

    def __init__(self) -> None:
        self._ended = ""
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[_Pass] = weakref.WeakSet()
        listen_for_forks(self)

    def check_open(self) -> None:
        """Raise if the pipeline is closed.

        Raises:
            RuntimeError: it is.
        """
        if self._ended:
            raise RuntimeError(self._ended)

    def begin(self, loader: Iterable[Any], copy: CopyAhead, depth: int) -> _Pass:
        """Start a pass. Its thread holds no reference to the pipeline.

        Raises:
            RuntimeError: the pipeline is closed.
        """
        # The loader may draw a seed: on this thread, as without prefetching.
        made = _Pass(iter(loader), copy, depth)
        with self._lock:
            self.check_open()
            self._all.add(made)
        made.start()
        return made

    def end(self, reason: str) -> None:
        """End all passes; later ones raise an error with ``reason``."""
        with self._lock:
            self._ended = reason
        for one in list(self._all):
            one.end(reason)

    def forked(self) -> None:
        """End all passes in a forked process, which has no loading threads."""
        self._lock = threading.Lock()
        self.end(FORKED)


class Prefetch:
    """A loader whose mini-batches are loaded and copied to their devices ahead of time.

    Each ``for`` is a new pass over the loader, on a thread of its own that ends with the pass. When a pass ends, a
    loader that is busy is given one second to return. A loader that draws from a global random generator in this
    process competes with layers that draw: give it a generator or workers of its own.

    Args:
        loader: an iterable of mini-batches: tensors, or nests of tensors.
        copy: copies a mini-batch to its devices.
        passes: those of the pipeline.
        depth: mini-batches that are loaded ahead, at most.

    Raises:
        TypeError: ``loader`` is not iterable.
        ValueError: ``depth`` is below 1.
        RuntimeError: the pipeline is closed.
    """

    def __init__(self, loader: Iterable[Any], copy: CopyAhead, passes: Passes, depth: int) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise InputTypeError(f"prefetch takes an iterable of mini-batches, got a {type(loader).__name__}")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise InputError(f"depth must be at least 1 mini-batch ahead, got {depth!r}")
        passes.check_open()
        self._loader = loader
        self._copy = copy
        self._passes = passes
        self._depth = depth

    def __iter__(self) -> Iterator[Any]:
        going = self._passes.begin(self._loader, self._copy, self._depth)
        try:
            while (made := going.take()) is not None:
                yield made.arrived()
                del made  # drop the previous mini-batch before waiting for the next
        finally:
            going.end("")

    def __len__(self) -> int:
        """The length of the loader, if it has one."""
        return len(self._loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader and its samplers that have ``set_epoch``, such as ``DistributedSampler``."""
        sampler = getattr(self._loader, "batch_sampler", None)
        inner = getattr(sampler, "sampler", None)
        listeners: list[Any] = [self._loader, getattr(self._loader, "sampler", None), sampler, inner]
        for listener in {id(one): one for one in listeners if hasattr(one, "set_epoch")}.values():
            listener.set_epoch(epoch)


class _Failed(NamedTuple):
    """An exception that the loader raised in place of a mini-batch."""

    error: BaseException


class _Pass:
    """One pass over a loader: a thread, a queue of loaded mini-batches, and a queue of free places."""

    def __init__(self, batches: Iterator[Any], copy: CopyAhead, depth: int) -> None:
        self._room: SimpleQueue[None] = SimpleQueue()  # `put` is safe even inside a garbage collection
        self._made: SimpleQueue[Copied | _Failed | None] = SimpleQueue()
        self._ended = False
        self._reason = ""
        self._modes = Modes.current()
        for _ in range(depth):
            self._room.put(None)
        # In a list, which the thread empties: it keeps its arguments while it runs.
        self._thread = threading.Thread(
            target=self._work, args=([batches], copy), name="pipepart-prefetch", daemon=True
        )
        self.start = self._thread.start

    def take(self) -> Copied | None:
        """Return the next mini-batch; None after the last.

        Raises:
            RuntimeError: the pipeline has been closed.
            BaseException: the error of the loader.
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
            del made  # break the cycle: traceback, this frame, error

    def end(self, reason: str) -> None:
        """End the thread; wait for it, at most a second if the loader does not return."""
        self._reason = self._reason or reason
        self._ended = True
        self._room.put(None)
        self._made.put(None)
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(_PATIENCE_SECONDS)

    def _work(self, given: list[Iterator[Any]], copy: CopyAhead) -> None:
        batches = given.pop()
        try:
            with self._modes.entered(), self._modes.autocasting():
                while True:
                    self._room.get()
                    if self._ended:
                        break
                    try:
                        batch = next(batches)
                    except StopIteration:
                        break
                    self._made.put(copy(batch))
                    del batch
            self._made.put(None)
        except BaseException as error:
            self._made.put(_Failed(error))
