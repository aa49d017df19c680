"""Peers: the processes that save or load a checkpoint. If one of them raises an error, all do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

from ..ranks import Ranks, attempt

T = TypeVar("T")


class Peers:
    """The processes of a checkpoint. All must call each method equally often, in the same order.

    Args:
        ranks: of the pipeline; None for one process.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)

    @classmethod
    def of(cls, pipe: Any, call: str) -> Peers:
        """Return the processes of a pipeline, which all make this call; a module has one process."""
        return cls(None if isinstance(pipe, nn.Module) else pipe.meet(call))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of the ranks; ``value`` is this one's."""
        return [value] if self._ranks is None else self._ranks.gather(value, patient=True)

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
