"""Estimates the costs at a micro-batch size that was not profiled, from the profiled sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...input_error import InputError
from ...profiling import Costs, LayerCost, Profile, Timing
from ...units import is_count


class _Line(NamedTuple):
    """Linear interpolation between the values at two micro-batch sizes; proportional if both sizes are equal.

    Attributes:
        low, high: the two sizes in samples.
        at: the size to estimate, in samples.
    """

    low: float
    high: float
    at: float

    def line(self, low: float, high: float) -> float:
        """Return the value at ``at``."""
        if self.low == self.high:
            return low * self.at / self.low
        return low + (high - low) * (self.at - self.low) / (self.high - self.low)

    def value(self, low: float, high: float) -> float:
        """Return the value at ``at``. Below ``low`` it is at least in proportion to the low value, above at least 0."""
        return max(self.line(low, high), low * self.at / self.low if self.at < self.low else 0.0)


def estimate(profile: Profile, micro_batches: int) -> Profile:
    """Return the profile with costs for a number of micro-batches. If they were not measured, estimates are added.

    Seconds and bytes of each layer are interpolated linearly in the samples of a micro-batch, between the measured
    sizes below and above. Outside the measured sizes they are extrapolated from the nearest two sizes, but a smaller
    micro-batch never costs less than in proportion to the smallest measured size. With only one measured size all costs
    are proportional to it.

    Args:
        profile: has the costs at one size or more.
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
    # Seconds are means over the micro-batches. Bytes are those of the largest micro-batch.
    mean = profile.batch / micro_batches
    samples = -(-profile.batch // micro_batches)
    measured = sorted(profile.costs, key=lambda costs: costs.samples)
    above = next((at for at, costs in enumerate(measured) if costs.samples >= samples), len(measured))
    high = measured[min(max(above, 1), len(measured) - 1)]
    low = measured[max(measured.index(high) - 1, 0)]
    seconds = _Line(_mean_samples(profile, low), _mean_samples(profile, high), mean)
    sizes = _Line(max(low.samples, 1), max(high.samples, 1), samples)
    # If the two sizes save or pass on different tensors, their bytes are proportional to those of the lower size.
    alike = _tensors(low) == _tensors(high)
    tensor_sizes = sizes if alike else sizes._replace(high=sizes.low)

    def resized(small: tuple[Any, ...], large: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            first.model_copy(update={"bytes": round(tensor_sizes.value(first.bytes, second.bytes))})
            for first, second in zip(small, large if alike else small, strict=True)
        )

    def resized_cost(small: LayerCost, large: LayerCost) -> LayerCost:
        fields: dict[str, Any] = {"slowdown": (small.slowdown + large.slowdown) / 2}
        for name in LayerCost.model_fields.keys() - fields:
            pair = getattr(small, name), getattr(large, name)
            if isinstance(pair[0], Timing):
                fields[name] = Timing(
                    seconds=seconds.value(pair[0].seconds, pair[1].seconds),
                    spread=seconds.value(pair[0].spread, pair[1].spread),
                )
            elif isinstance(pair[0], tuple):
                fields[name] = resized(*pair)
            elif name == "split_seconds" and None not in pair:
                fields[name] = seconds.line(*pair)
            elif None not in pair:
                fields[name] = round(sizes.value(*pair))
        return LayerCost.model_validate(fields)

    return Costs(
        micro_batches=micro_batches,
        samples=samples,
        layers=tuple(map(resized_cost, low.layers, high.layers)),
        loss=resized_cost(low.loss, high.loss),
        values=resized(low.values, high.values),
        saved=resized(low.saved, high.saved),
    )


def _tensors(costs: Costs) -> object:
    """Return the tensors that layers save, pass on, or give to collectives, without their bytes."""
    layers = (*costs.layers, costs.loss)
    collectives = [part for cost in layers for part in (cost.forward_collectives, cost.backward_collectives)]
    return [
        [each.model_copy(update={"bytes": 0}) for each in part]
        for part in (costs.saved, costs.values, *collectives)
    ]


def _mean_samples(profile: Profile, costs: Costs) -> float:
    """Return the samples of the micro-batch to which the seconds apply."""
    return profile.batch / costs.micro_batches if costs.scale else max(costs.samples, 1)
