"""How the processes that save or load one checkpoint agree: every one goes on, or every one raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a training. All call :meth:`gather` equally often, in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of the ranks; ``value`` is this one's, plain JSON."""
        ...


class OneProcess:
    """The one process of a training without torchrun."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """Return the value alone."""
        return [value]


def agreed(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank; return its result on this one, once it has succeeded on all.

    Raises:
        Exception: what ``work`` raised on this rank.
        RuntimeError: it failed on another rank, which the message names.
    """
    try:
        result = work()
    except Exception as error:
        ranks.gather(f"{type(error).__name__}: {error}")
        raise
    for rank, failure in enumerate(ranks.gather(None)):
        if failure is not None:
            raise RuntimeError(f"rank {rank} failed: {failure}")
    return result


def ranks_of(pipe: object) -> Ranks:
    """Return the processes that a pipeline runs in; a module has one."""
    return getattr(pipe, "ranks", None) or OneProcess()
