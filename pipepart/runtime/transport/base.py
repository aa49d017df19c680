"""The interface that carries messages between the stages of one step.

A worker *sends* what a stage has made for another stage, and *receives* what a stage needs, waiting for it. A message
is keyed by the action that receives it: (kind, stage, micro-batch).
"""

from __future__ import annotations

from typing import Any, Protocol

from schedules import Kind

# The action that receives the message. The gradient of a shared parameter has the parameter's number for a kind.
Key = tuple[Kind | int, int, int]


class Stopped(Exception):
    """The step has failed on another device, so no message will come."""


class Transport(Protocol):
    """Carries the messages of one step. Stages are numbered as in its schedule."""

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Send a message from one stage to another. Called on the worker of ``sender``; does not wait."""
        ...

    def recv(self, receiver: int, key: Key) -> Any:
        """Wait for the message ``key`` and return it. Called on the worker of ``receiver``.

        Raises:
            Stopped: the step has failed elsewhere.
        """
        ...

    def stop(self) -> None:
        """Wake every worker that waits now or later with :class:`Stopped`, and drop all messages."""
        ...


class ForwardingTransport:
    """A transport that forwards every call to another one; subclasses change one of them."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Forward the message."""
        self._inner.send(sender, receiver, key, message)

    def recv(self, receiver: int, key: Key) -> Any:
        """Return the message that the inner transport received."""
        return self._inner.recv(receiver, key)

    def stop(self) -> None:
        """Stop the inner transport."""
        self._inner.stop()
