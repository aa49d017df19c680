"""Micro-batches of unequal size: measures the largest and the smallest, and interpolates seconds between them."""

from __future__ import annotations

from collections.abc import Callable

from ..data.split import MicroBatches
from .costs import Timing
from .method import Measured, Method, micro_batch_of
from .timing import LayerTimes


def measure_sizes(method: Method, parts: MicroBatches, done: Callable[[float], None]) -> Measured:
    """Measure the micro-batches of one mini-batch: bytes of the largest, mean seconds of all.

    A batch of 9 in 8 micro-batches has sizes 2, 1, 1, ...: priced as the largest, it would take 16 samples' time.

    Args:
        method: how to measure a micro-batch.
        parts: the micro-batches.
        done: called with the part that is done, from 0 to 1.
    """
    least, most = min(parts.sizes), max(parts.sizes)
    if least == most:
        return method.measure(micro_batch_of(method, parts, most), done)
    large = method.measure(micro_batch_of(method, parts, most), lambda part: done(part / 2))
    small = method.measure(micro_batch_of(method, parts, least), lambda part: done((1 + part) / 2))
    shares = [(size - least) / (most - least) for size in parts.sizes]
    mean = sum(shares) / len(shares)
    times = [_between(*pair, mean) for pair in zip(small.times, large.times, strict=True)]
    first, last, middle = (sum(time.seconds for time in own) for own in (small.times, large.times, times))
    scale = tuple((first + (last - first) * share) / middle for share in shares) if middle else ()
    return large._replace(times=times, repeats=min(large.repeats, small.repeats), scale=scale)


def _between(small: LayerTimes, large: LayerTimes, share: float) -> LayerTimes:
    """Return the times at a share of the way from the smallest micro-batch to the largest."""

    def number(one: float, other: float) -> float:
        return one + (other - one) * share

    def timing(one: Timing, other: Timing) -> Timing:
        return Timing(seconds=number(one.seconds, other.seconds), spread=number(one.spread, other.spread))

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
