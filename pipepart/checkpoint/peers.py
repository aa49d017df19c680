"""Peers: the processes that save or load a checkpoint. If one of them raises an error, all do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from ..ranks import Ranks, attempt

T = TypeVar("T")
_peers: weakref.WeakKeyDictionary[object, Peers] = weakref.WeakKeyDictionary()


class Peers:
    """The processes of a checkpoint. All must call each method equally often, in the same order.

    They have a group of their own, whose waits for a rank that writes have no timeout.

    Args:
        ranks: of the pipeline, all of which make this at the same point of their scripts; None for one process.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._group = None if ranks is None else ranks.new_group()

    @classmethod
    def of(cls, pipe: Any, call: str) -> Peers:
        """Return the processes of a pipeline, which all make this call; a module has one process.

        Args:
            call: the name of the function, with the arguments that are the same on all ranks.

        Raises:
            RuntimeError: another rank makes another call, has failed, or is lost.
        """
        ranks: Ranks | None = None if isinstance(pipe, nn.Module) else pipe.meet(call)
        if ranks is None:
            return cls(None)
        if pipe not in _peers:
            _peers[pipe] = cls(ranks)
        return _peers[pipe]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of the ranks; ``value`` is this one's.

        Raises:
            RankError: another rank has failed, or is lost.
        """
        if self._ranks is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:  # a connection broke
            raise self._ranks.lost(error) from None  # which has the error, if nothing else is known
        return values

    def agree(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank, wait until all have succeeded, and return the result of this rank.

        Raises:
            Exception: what ``work`` raised on this rank.
            RuntimeError: it failed on another rank, which the message names.
        """
        result, failure, why = attempt(work)
        everyone = self.gather(why)
        if failure is not None:
            raise failure
        for rank, other in enumerate(everyone):
            if other:
                raise RuntimeError(f"rank {rank} failed: {other}")
        return cast(T, result)
