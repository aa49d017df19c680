"""Tells the trace of the simulated devices what orders the threads of the host: messages, queues and calls of autograd.

What a thread takes out of a queue tells it all that was known when that was put in. A message between workers tells so
when its receiver asks for it: others that came before it and are only stored order nothing yet. Locks, joins and other
means of ``threading`` order nothing here: a program that needs them to be right is reported, not passed.
"""

from __future__ import annotations

import itertools
import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from torch.autograd import graph

from pipepart.runtime.transport.threads import Key, ThreadTransport
from tests.vdev import devices

_Plain = queue.SimpleQueue
_numbers = itertools.count(1)
_tracking = False


def are_tracked() -> bool:
    """Return True within a block of :func:`tracked`."""
    return _tracking


def tracked_queue(backend: ModuleType) -> type[queue.SimpleQueue[Any]]:
    """Return a class of queues that tell ``backend`` which put each item taken is from."""

    class SimpleQueue(_Plain):  # type: ignore[type-arg, misc]
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            number = next(_numbers)
            backend.put(number)
            super().put((number, item), block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            number, item = super().get(block, timeout)
            backend.get(number)
            return item

        def get_nowait(self) -> Any:
            return self.get(block=False)

        def put_nowait(self, item: Any) -> None:
            self.put(item)

    return SimpleQueue


class _Sent(NamedTuple):
    """A message with the number of its put."""

    number: int
    message: Any


class _TrackedTransport(ThreadTransport):
    """Messages that tell the trace of their sending when they are asked for."""

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        number = next(_numbers)
        devices._loaded().put(number)
        super().send(sender, receiver, key, _Sent(number, message))

    def recv(self, receiver: int, key: Key) -> Any:
        number, message = super().recv(receiver, key)
        devices._loaded().get(number)
        return message


@contextmanager
def tracked() -> Iterator[None]:
    """Track the queues that pipepart makes within the block, and the calls of autograd."""
    global _tracking
    backend = devices._loaded()
    run = graph._engine_run_backward

    def run_backward(*given: Any, **named: Any) -> Any:
        if not backend.tracing():
            return run(*given, **named)
        number = backend.begin_call()
        try:
            return run(*given, **named)
        finally:
            backend.end_call(number)

    replaced = {
        "SimpleQueue": (_Plain, tracked_queue(backend)),
        "_engine_run_backward": (run, run_backward),
        "ThreadTransport": (ThreadTransport, _TrackedTransport),
    }
    changed: list[tuple[ModuleType, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name == ThreadTransport.__module__:
            continue  # its queues hold messages
        if name.split(".")[0] == "pipepart" or name in ("queue", "torch.autograd", "torch.autograd.graph"):
            for attribute, (before, after) in replaced.items():
                if vars(module).get(attribute) is before:
                    changed.append((module, attribute, before))
                    setattr(module, attribute, after)
    _tracking = True
    try:
        yield
    finally:
        _tracking = False
        for module, attribute, before in changed:
            setattr(module, attribute, before)
