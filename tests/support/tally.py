"""Counts the calls and the work of blocks, in a file of its own: a model whose blocks share a counter is refused."""

from collections import Counter

from torch import nn


class Clock:
    """In place of the host's clock: shows the work that layers have done, and nothing else."""

    def __init__(self) -> None:
        self.work = 0.0

    def perf_counter(self) -> float:
        return self.work


clock = Clock()
calls: Counter[nn.Module] = Counter()


def called(block: nn.Module) -> None:
    """Count one call."""
    calls[block] += 1


def worked(seconds: float) -> None:
    """Let the clock go on."""
    clock.work += seconds
