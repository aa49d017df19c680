"""Estimates the costs at a micro-batch size that was not profiled, from the sizes that were."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...input_error import InputError
from ...profiling import Costs, LayerCost, Profile, Timing
from ...units import is_count


class _Line(NamedTuple):
    """A straight line through the values at two sizes, low and high; in proportion if they are one size.

    Attributes:
        low, high: samples of the two sizes.
        at: samples of the size whose value is wanted.
    """

    low: float
    high: float
    at: float

    def value(self, low: float, high: float) -> float:
        """Return the value; below the sizes at least the share of the lower one, above them at least 0."""
        share = low * self.at / self.low
        if self.low == self.high:
            return share
        found = low + (high - low) * (self.at - self.low) / (self.high - self.low)
        return max(found, share if self.at < self.low else 0.0)


def estimate(profile: Profile, micro_batches: int) -> Profile:
    """Return the profile with costs for a number of micro-batches: those measured, or else estimated and added.

    Seconds and bytes of each layer are taken to grow along a straight line with the samples of a micro-batch, through
    the measured sizes below and above it. Beyond the measured sizes the line through the nearest two goes on, but a
    smaller micro-batch never costs less than its share of the smallest measured one. With one measured size all costs
    are in proportion to it.

    Args:
        profile: with the costs at one size at least.
        micro_batches: from 1 to the number of samples of the mini-batch.

    Raises:
        ValueError: the mini-batch has fewer samples.
    """
    if not is_count(micro_batches) or micro_batches > profile.batch:
        raise InputError(
            f"micro_batches must be from 1 to the {profile.batch} samples of the mini-batch, got {micro_batches!r}"
        )
    if any(costs.micro_batches == micro_batches for costs in profile.costs):
        return profile
    return profile.model_copy(update={"costs": (*profile.costs, _estimated(profile, micro_batches))})


def _estimated(profile: Profile, micro_batches: int) -> Costs:
    mean = (
        profile.batch / micro_batches
    )  # seconds are means over the micro-batches, bytes those of the largest
    samples = -(-profile.batch // micro_batches)
    measured = sorted(profile.costs, key=lambda costs: costs.samples)
    above = next((at for at, costs in enumerate(measured) if costs.samples >= samples), len(measured))
    high = measured[min(max(above, 1), len(measured) - 1)]
    low = measured[max(measured.index(high) - 1, 0)]
    seconds = _Line(_mean_samples(profile, low), _mean_samples(profile, high), mean)
    sizes = _Line(max(low.samples, 1), max(high.samples, 1), samples)
    alike = _tensors(low) == _tensors(high)  # otherwise tensors are in proportion to those of the lower size
    of_tensors = sizes if alike else sizes._replace(high=sizes.low)

    def resized(small: tuple[Any, ...], large: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            one.model_copy(update={"bytes": round(of_tensors.value(one.bytes, other.bytes))})
            for one, other in zip(small, large if alike else small, strict=True)
        )

    return Costs(
        micro_batches=micro_batches,
        samples=samples,
        layers=tuple(_cost(seconds, sizes, *pair) for pair in zip(low.layers, high.layers, strict=True)),
        loss=_cost(seconds, sizes, low.loss, high.loss),
        values=resized(low.values, high.values),
        saved=resized(low.saved, high.saved),
    )


def _tensors(costs: Costs) -> object:
    """Return what is kept and passed on, without its sizes."""
    return [tensor.model_copy(update={"bytes": 0}) for tensor in (*costs.saved, *costs.values)]


def _mean_samples(profile: Profile, costs: Costs) -> float:
    """Return the samples of a micro-batch whose seconds these are."""
    return profile.batch / costs.micro_batches if costs.scale else max(costs.samples, 1)


def _cost(seconds: _Line, sizes: _Line, low: LayerCost, high: LayerCost) -> LayerCost:
    def timing(one: Timing, other: Timing) -> Timing:
        return Timing(
            seconds=seconds.value(one.seconds, other.seconds), spread=seconds.value(one.spread, other.spread)
        )

    found: dict[str, object] = {"slowdown": (low.slowdown + high.slowdown) / 2}
    for name in ("forward", "backward_input", "backward_weight"):
        found[name] = timing(getattr(low, name), getattr(high, name))
    for name in (name for name in LayerCost.model_fields if name.endswith("_bytes")):
        pair = getattr(low, name), getattr(high, name)
        if None not in pair:
            found[name] = round(sizes.value(*pair))
    if low.split_seconds is not None and high.split_seconds is not None:  # the same part of the backward
        backward = low.backward_seconds + high.backward_seconds
        part = (low.split_seconds + high.split_seconds) / backward if backward else 0.0
        found["split_seconds"] = part * seconds.value(low.backward_seconds, high.backward_seconds)
    return LayerCost.model_validate(found)
