"""How the processes that save or load one checkpoint agree: every one goes on, or every one raises."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import nn

from ..input_error import InputError
from ..ranks import Ranks

T = TypeVar("T")


class Peers(Protocol):
    """The processes of a checkpoint. All call :meth:`gather` equally often, in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of the ranks; ``value`` is this one's."""
        ...


class OneProcess:
    """The one process of a training without torchrun."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """Return the value alone."""
        return [value]


class Beside:
    """The processes of a pipeline, with connections of their own: a thread may use them while steps run.

    Args:
        ranks: of the pipeline. All make this at the same point of their scripts.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._lost = ranks.lost
        self._group = ranks.new_group()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes.

        Raises:
            RankError: another rank has failed, or is lost.
        """
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:  # a connection broke
            raise self._lost(error) from None  # which has the error, if nothing else is known
        return found


_beside: weakref.WeakKeyDictionary[object, Beside] = weakref.WeakKeyDictionary()


def peers_of(pipe: Any, call: str) -> Peers:
    """Return the processes of a pipeline, all of which make the call of this name; a module has one.

    Raises:
        RuntimeError: another rank makes another call, has failed, or is lost.
    """
    ranks: Ranks | None = None if isinstance(pipe, nn.Module) else pipe.meet(call)
    if ranks is None:
        return OneProcess()
    if pipe not in _beside:
        _beside[pipe] = Beside(ranks)
    return _beside[pipe]


def agreed(peers: Peers, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank; return its result on this one, once it has succeeded on all.

    Raises:
        Exception: what ``work`` raised on this rank.
        RuntimeError: it failed on another rank, which the message names.
    """
    try:
        result = work()
    except Exception as error:
        peers.gather(f"{type(error).__name__}: {error}")
        raise
    for rank, failure in enumerate(peers.gather(None)):
        if failure is not None:
            raise RuntimeError(f"rank {rank} failed: {failure}")
    return result


def check_alike(peers: Peers, **arguments: Any) -> None:
    """Check that all ranks were given equal arguments.

    Raises:
        ValueError: names one that differs.
    """
    everyone = peers.gather(arguments)
    for rank, given in enumerate(everyone):
        for name, value in given.items():
            if value != everyone[0][name]:
                raise InputError(f"rank {rank} has {name}={value!r}, and rank 0 {name}={everyone[0][name]!r}")
