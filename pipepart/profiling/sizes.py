"""Measures micro-batches of unequal sizes: the largest and the smallest, with seconds interpolated in between."""

from __future__ import annotations

from collections.abc import Callable

from ..data.split import MicroBatches
from .costs import Timing
from .method import Measured, Method, micro_batch_of
from .timing import LayerTimes


def measure_sizes(method: Method, parts: MicroBatches, done: Callable[[float], None]) -> Measured:
    """Measure the micro-batches of one mini-batch: bytes of the largest, mean seconds of all.

    Eight micro-batches of 9 samples have sizes 2, 1, 1, ... With the seconds of the largest for each of them, the
    mini-batch would cost as much as 16 samples.

    Args:
        method: the profiling method.
        parts: the micro-batches of the mini-batch.
        done: called with the fraction of the work that is done, from 0 to 1.
    """
    smallest, largest = min(parts.sizes), max(parts.sizes)
    if smallest == largest:
        return method.measure(micro_batch_of(method, parts, largest), done)
    large = method.measure(micro_batch_of(method, parts, largest), lambda part: done(part / 2))
    small = method.measure(micro_batch_of(method, parts, smallest), lambda part: done((1 + part) / 2))
    shares = [(size - smallest) / (largest - smallest) for size in parts.sizes]
    mean_share = sum(shares) / len(shares)
    times = [_between(*pair, mean_share) for pair in zip(small.times, large.times, strict=True)]
    low, high, mean = (sum(time.seconds for time in layers) for layers in (small.times, large.times, times))
    scale = tuple((low + (high - low) * share) / mean for share in shares) if mean else ()
    return large._replace(times=times, repeats=min(large.repeats, small.repeats), scale=scale)


def _between(small: LayerTimes, large: LayerTimes, share: float) -> LayerTimes:
    """Interpolate linearly between the times of two micro-batches: ``small`` at share 0, ``large`` at share 1."""

    def number(low: float, high: float) -> float:
        return low + (high - low) * share

    def timing(low: Timing, high: Timing) -> Timing:
        return Timing(seconds=number(low.seconds, high.seconds), spread=number(low.spread, high.spread))

    split = None
    if small.split_seconds is not None and large.split_seconds is not None:
        split = number(small.split_seconds, large.split_seconds)
    return LayerTimes(
        timing(small.forward, large.forward),
        timing(small.backward_input, large.backward_input),
        timing(small.backward_weight, large.backward_weight),
        split,
        number(small.slowdown, large.slowdown),
    )
