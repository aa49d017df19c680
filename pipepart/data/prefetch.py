"""Prefetching: the next mini-batches are loaded, moved and split on a thread of their own while one trains.

::

    thread of the pass                            the caller's thread
    wait for room ─▶ next(loader) ─▶ pin, move, split ──▶ made ──▶ take ──▶ pipe.step
         ▲                                                          │
         └──────────────────────── room ◀──────────────────────────┘

Nothing but these two queues is between the threads. To end a pass is to leave a word in both of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from ..planning import Plan
from ..workers.forks import FORKED, listen_for_forks
from ..workers.modes import Modes
from .arguments import Arguments
from .device_batch import Copies, MiniBatch
from .split import Splitter

ToArguments = Callable[[Any], tuple[Sequence[Any], Mapping[str, Any], Any]]

_PATIENCE_SECONDS = 1.0  # for a loader that is at work when its pass ends; the thread ends when it returns


class Passes:
    """The passes over loaders that go on for a pipeline."""

    def __init__(self) -> None:
        listen_for_forks(self)
        self.ended = ""
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[_Pass] = weakref.WeakSet()

    def begin(self, loader: Iterable[Any], prepare: Callable[[Any], Any], depth: int) -> _Pass:
        """Starts a pass, whose thread holds nothing of the pipeline.

        Raises:
            RuntimeError: the pipeline is closed.
        """
        made = _Pass(iter(loader), prepare, depth)  # the loader may draw a seed: on this thread, as without
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
    """A loader whose mini-batches are made ready for a pipeline on a thread, while the one before trains.

    Inputs go to the first device and targets to the last, by way of pinned memory and on a stream of their own where
    these are accelerators, and both are split; ``step`` and the pipeline itself take them as they are. Each ``for`` is
    a new pass over the loader. The thread ends with its pass; a loader that does not return is given a second, and its
    thread ends when it does. A loader that draws from a global generator while it runs in this process competes with
    layers that draw: give it a generator or workers of its own.

    Args:
        loader: its mini-batches are pairs of an input and a target, lists or tuples of one input, or an input of
            another form; what is yielded has the same form.
        plan, splitter: of the pipeline.
        passes: those of the pipeline.
        depth: mini-batches that are made ahead, at most.
        to_arguments: called with what the loader gives; returns positional arguments, keyword arguments and the target
            or None. Pairs are yielded then.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        plan: Plan,
        splitter: Splitter | None,
        passes: Passes,
        depth: int,
        to_arguments: ToArguments | None,
    ) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(f"prefetch takes an iterable of mini-batches, got a {type(loader).__name__}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1 mini-batch ahead, got {depth}")
        if passes.ended:
            raise RuntimeError(passes.ended)
        self._loader = loader
        self._passes = passes
        self._depth = depth
        self._prepare = _Prepare(plan, splitter, to_arguments)

    def __iter__(self) -> Iterator[Any]:
        going = self._passes.begin(self._loader, self._prepare, self._depth)
        try:
            while (made := going.take()) is not None:
                yield made.given
                del made  # what has been trained is not held while the next is waited for
        finally:
            going.end("")

    def __len__(self) -> int:
        """That of the loader, where it has one."""
        return len(self._loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tells the loader and its samplers the epoch, those that ask for it, as ``DistributedSampler`` does."""
        sampler = getattr(self._loader, "batch_sampler", None)
        listeners = [self._loader, getattr(self._loader, "sampler", None), sampler]
        listeners.append(getattr(sampler, "sampler", None))
        for listener in {id(one): one for one in listeners if hasattr(one, "set_epoch")}.values():
            listener.set_epoch(epoch)


class _Made(NamedTuple):
    """What the thread hands over: a mini-batch as the caller gets it, or what was raised in its place."""

    given: Any = None
    error: BaseException | None = None


class _Prepare:
    """From a loader's batch to what the caller gets for it."""

    def __init__(self, plan: Plan, splitter: Splitter | None, to_arguments: ToArguments | None) -> None:
        devices = plan.devices
        self._first, self._last = (torch.device(d.torch_device or "cpu") for d in (devices[0], devices[-1]))
        self._most = plan.micro_batches
        self._splitter = splitter
        self._to_arguments = to_arguments
        self._streams: dict[torch.device, torch.Stream] = {}

    def __call__(self, batch: Any) -> Any:
        sequence = type(batch) in (tuple, list)
        if self._to_arguments is not None:
            args, kwargs, target = self._to_arguments(batch)
            value = Arguments(*args, **kwargs).input
        elif sequence and len(batch) not in (1, 2):
            raise TypeError(
                f"the loader gives {type(batch).__name__}s of {len(batch)}: say what is input and what is target, "
                "prefetch(loader, to_arguments=lambda batch: (args, kwargs, target))"
            )
        else:
            value, target = (batch[0], batch[1] if len(batch) == 2 else None) if sequence else (batch, None)
        copies = Copies(self._streams)
        made = MiniBatch(
            copies.to(value, self._first),
            copies.to(target, self._last),
            self._most,
            self._splitter,
            copies,
        )
        if self._to_arguments is None and (not sequence or len(batch) == 1):
            return made.given()[:1] if sequence else made.given()[0]
        return made.given()


class _Pass:
    """One pass over a loader: a thread, what it has made, and room for what it may make."""

    def __init__(self, batches: Iterator[Any], prepare: Callable[[Any], Any], depth: int) -> None:
        self._room: SimpleQueue[None] = SimpleQueue()  # its puts are safe wherever a collector may run
        self._made: SimpleQueue[_Made | None] = SimpleQueue()
        self._ended = False
        self._reason = ""
        self._modes = Modes.current()
        for _ in range(depth):
            self._room.put(None)
        self._thread = threading.Thread(
            target=self._work, args=([batches], prepare), name="pipepart-prefetch", daemon=True
        )
        del batches

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self) -> _Made | None:
        """The next mini-batch; None behind the last.

        Raises:
            RuntimeError: the pipeline has been closed.
            BaseException: what the loader, or the split of what it gave, raised in the place of a mini-batch.
        """
        made = None if self._reason else self._made.get()
        if self._reason:
            raise RuntimeError(self._reason)
        if made is None or made.error is None:
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

    def _work(self, given: list[Iterator[Any]], prepare: Callable[[Any], Any]) -> None:
        batches = given.pop()  # the thread object keeps its arguments while it runs
        try:
            with self._modes.entered(), self._modes.autocasting():
                while not self._waited_in_vain():
                    try:
                        batch = next(batches)
                    except StopIteration:
                        break
                    self._made.put(_Made(prepare(batch)))
                    del batch
            self._made.put(None)
        except BaseException as error:
            self._made.put(_Made(error=error))

    def _waited_in_vain(self) -> bool:
        """Whether the pass has ended when there is room."""
        self._room.get()
        return self._ended
