"""Estimates the costs at a micro-batch size that was not profiled, from the sizes that were."""

from __future__ import annotations

from ...profiling import Costs, LayerCost, Profile, SavedTensor, Timing


def estimate(profile: Profile, micro_batches: int) -> Costs:
    """Return the costs for a number of micro-batches: measured ones, or an estimate.

    Seconds and bytes of each layer are taken to grow along a straight line with the samples of a micro-batch, through
    the two measured sizes next to it. Beyond the measured sizes the line goes on, but a smaller micro-batch never costs
    less than its share of the smallest measured one. With one measured size all costs are in proportion to it.

    Args:
        profile: with the costs at one size at least.
        micro_batches: from 1 to the number of samples of the mini-batch.
    """
    for costs in profile.costs:
        if costs.micro_batches == micro_batches:
            return costs
    samples = -(-profile.batch // micro_batches)
    near = sorted(profile.costs, key=lambda costs: (abs(costs.samples - samples), costs.samples))[:2]
    near.sort(key=lambda costs: costs.samples)
    low, high = near[0], near[-1]
    line = _Line(low.samples, high.samples, samples)
    alike = len(low.saved) == len(high.saved) and all(
        (a.layers, a.input_of) == (b.layers, b.input_of) for a, b in zip(low.saved, high.saved, strict=True)
    )
    return Costs(
        micro_batches=micro_batches,
        samples=samples,
        layers=tuple(_cost(line, a, b) for a, b in zip(low.layers, high.layers, strict=True)),
        loss=_cost(line, low.loss, high.loss),
        saved=tuple(
            SavedTensor(bytes=line.bytes(a.bytes, b.bytes), layers=a.layers, input_of=a.input_of)
            for a, b in zip(low.saved, high.saved if alike else low.saved, strict=True)
        )
        if alike
        else tuple(
            piece.model_copy(update={"bytes": round(piece.bytes * samples / max(low.samples, 1))})
            for piece in low.saved
        ),
    )


class _Line:
    """A straight line through the values at two sizes, evaluated at a third size."""

    def __init__(self, low: int, high: int, samples: int) -> None:
        self._low, self._high, self._samples = max(low, 1), max(high, 1), samples

    def at(self, low: float, high: float) -> float:
        """Return the value at the third size, from the values at the two sizes."""
        share = low * self._samples / self._low
        if self._low == self._high:
            return share
        value = low + (high - low) * (self._samples - self._low) / (self._high - self._low)
        return max(value, share if self._samples < self._low else 0.0)

    def bytes(self, low: int, high: int) -> int:
        """The same for a size in bytes."""
        return round(self.at(low, high))


def _cost(line: _Line, low: LayerCost, high: LayerCost) -> LayerCost:
    def timing(a: Timing, b: Timing) -> Timing:
        return Timing(seconds=line.at(a.seconds, b.seconds), spread=line.at(a.spread, b.spread))

    return LayerCost(
        forward=timing(low.forward, high.forward),
        backward_input=timing(low.backward_input, high.backward_input),
        backward_weight=timing(low.backward_weight, high.backward_weight),
        split_seconds=_split_seconds(line, low, high),
        saved_bytes=line.bytes(low.saved_bytes, high.saved_bytes),
        input_bytes=line.bytes(low.input_bytes, high.input_bytes),
        output_bytes=line.bytes(low.output_bytes, high.output_bytes),
        workspace_bytes=line.bytes(low.workspace_bytes, high.workspace_bytes),
        deferred_bytes=line.bytes(low.deferred_bytes, high.deferred_bytes),
    )


def _split_seconds(line: _Line, low: LayerCost, high: LayerCost) -> float | None:
    """Return the seconds of splitting, the same fraction of the backward as at the two sizes."""
    if low.split_seconds is None or high.split_seconds is None:
        return None
    backward = low.backward_seconds + high.backward_seconds
    part = (low.split_seconds + high.split_seconds) / backward if backward else 0.0
    return part * line.at(low.backward_seconds, high.backward_seconds)
