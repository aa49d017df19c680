"""Counts the bytes of tensors that torch allocates on the CPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocated(NamedTuple):
    """Bytes that a call allocated and did not free: the most at any time, and those at its end."""

    peak: int
    kept: int


def allocated(work: Callable[[], Any]) -> Allocated:
    """Run ``work`` and return what it allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    now = peak = 0
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    del result
    return Allocated(peak, now)
