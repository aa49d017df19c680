"""Estimates the costs at a micro-batch size that was not profiled, from the sizes that were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...input_error import InputError
from ...profiling import Costs, LayerCost, LiveValue, Profile, Timing
from ...units import is_count

_Line = Callable[
    [float, float], float
]  # the value at the new size, from the values at the two sizes next to it


def estimate(profile: Profile, micro_batches: int) -> Profile:
    """Return the profile with costs for a number of micro-batches: those measured, or else estimated and added.

    Seconds and bytes of each layer are taken to grow along a straight line with the samples of a micro-batch, through
    the two measured sizes next to it. Beyond the measured sizes the line goes on, but a smaller micro-batch never costs
    less than its share of the smallest measured one. With one measured size all costs are in proportion to it.

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
    samples = -(-profile.batch // micro_batches)
    measured = sorted(profile.costs, key=lambda costs: costs.samples)
    # The first of the two sizes around the new one; beyond the ends, of the two at that end.
    first = sum(costs.samples < samples for costs in measured) - 1
    first = min(max(first, 0), max(len(measured) - 2, 0))
    low, high = measured[first], measured[min(first + 1, len(measured) - 1)]
    line: _Line = partial(_on_line, max(low.samples, 1), max(high.samples, 1), samples)
    kept, others = ([(piece.layers, piece.input_of) for piece in costs.saved] for costs in (low, high))
    # Where other tensors are saved at the two sizes, they are in proportion to the lower one.
    pairs = zip(low.saved, high.saved if kept == others else low.saved, strict=True)
    of_saved = (
        line if kept == others else partial(_on_line, max(low.samples, 1), max(low.samples, 1), samples)
    )
    return Costs(
        micro_batches=micro_batches,
        samples=samples,
        layers=tuple(_cost(line, a, b) for a, b in zip(low.layers, high.layers, strict=True)),
        loss=_cost(line, low.loss, high.loss),
        values=tuple(_value(samples, (low, high), number) for number in range(len(low.values))),
        saved=tuple(a.model_copy(update={"bytes": round(of_saved(a.bytes, b.bytes))}) for a, b in pairs),
    )


def _on_line(low_samples: int, high_samples: int, samples: int, low: float, high: float) -> float:
    share = low * samples / low_samples
    if low_samples == high_samples:
        return share
    value = low + (high - low) * (samples - low_samples) / (high_samples - low_samples)
    return max(value, share if samples < low_samples else 0.0)


def _value(samples: int, measured: tuple[Costs, Costs], number: int) -> LiveValue:
    """Return a live value at another size: in proportion to the lower one where others are live at the two sizes."""
    low, high = measured
    value = low.values[number]
    other = (
        high.values[number] if [v.layers for v in low.values] == [v.layers for v in high.values] else value
    )
    sizes = max(low.samples, 1), max(high.samples if other is not value else low.samples, 1)
    return value.model_copy(update={"bytes": round(_on_line(*sizes, samples, value.bytes, other.bytes))})


def _cost(line: _Line, low: LayerCost, high: LayerCost) -> LayerCost:
    def timing(a: Timing, b: Timing) -> Timing:
        return Timing(seconds=line(a.seconds, b.seconds), spread=line(a.spread, b.spread))

    names = [name for name in LayerCost.model_fields if name.endswith("_bytes")]
    known = [name for name in names if getattr(low, name) is not None and getattr(high, name) is not None]
    sizes = {name: round(line(getattr(low, name), getattr(high, name))) for name in known}
    split = None
    if low.split_seconds is not None and high.split_seconds is not None:  # the same fraction of the backward
        backward = low.backward_seconds + high.backward_seconds
        part = (low.split_seconds + high.split_seconds) / backward if backward else 0.0
        split = part * line(low.backward_seconds, high.backward_seconds)
    return LayerCost(
        forward=timing(low.forward, high.forward),
        backward_input=timing(low.backward_input, high.backward_input),
        backward_weight=timing(low.backward_weight, high.backward_weight),
        split_seconds=split,
        **sizes,
    )
