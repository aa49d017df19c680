"""Counts the calls and the work of blocks in queues, which nobody reads meanwhile: blocks share no Python values."""

from collections import Counter
from queue import SimpleQueue
from typing import TypeVar

from torch import nn

_Item = TypeVar("_Item")
_work: SimpleQueue[float] = SimpleQueue()
_calls: SimpleQueue[nn.Module] = SimpleQueue()


class Clock:
    """In place of the host's clock: shows the work that layers have done, and nothing else."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def perf_counter(self) -> float:
        self._seconds += sum(_drained(_work))
        return self._seconds


clock = Clock()


def called(block: nn.Module) -> None:
    """Count one call."""
    _calls.put(block)


def worked(seconds: float) -> None:
    """Let the clock go on."""
    _work.put(seconds)


def calls() -> Counter[nn.Module]:
    """Return the number of calls of each block since this was asked before."""
    return Counter(_drained(_calls))


def _drained(queue: SimpleQueue[_Item]) -> list[_Item]:
    return [queue.get_nowait() for _ in range(queue.qsize())]
