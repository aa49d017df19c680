"""Micro-batches of unequal size are priced by their own sizes."""

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Roofline
from pipepart.planning.costs.interpolate import estimate
from pipepart.profiling import Costs, LayerCost, Timing

ROOFLINE = Roofline.parse("cpu: 1 GFLOP/s, 1 PB/s, 10 us")  # seconds grow along a straight line
MODEL = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def profile(micro_batches: int | list[int], batch: int = 9, **options) -> pipepart.Profile:
    return pipepart.profile(
        MODEL,
        torch.zeros(batch, 64),
        micro_batches=micro_batches,
        measure=False,
        roofline=ROOFLINE,
        **options,
    )


def test_seconds_are_means_bytes_those_of_the_largest_and_scale_has_each_size():
    """9 samples in 8: one of two samples, seven of one."""
    costs = profile(8).costs[0]
    small, large = (profile(1, batch=size).costs[0] for size in (1, 2))
    assert costs.samples == 2
    for cost, one, two in zip(costs.layers, small.layers, large.layers, strict=True):
        assert cost.forward.seconds == pytest.approx((7 * one.forward.seconds + two.forward.seconds) / 8)
        assert cost.output_bytes == two.output_bytes
    assert costs.scale[0] > costs.scale[1]
    assert len(set(costs.scale[1:])) == 1
    assert sum(costs.scale) == pytest.approx(8)


def test_a_split_function_has_the_sizes_that_it_makes():
    def split(pair, parts):
        return [(part, None) for part in pair[0].split([1, 3, 5])] if parts == 3 else [pair]

    costs = profile(3, split=split).costs[0]
    assert costs.samples == 5
    first, second, third = costs.scale
    assert second - first == pytest.approx(third - second)
    assert sum(costs.scale) == pytest.approx(3)


def test_an_estimate_lies_between_the_measured_sizes_around_it():
    """Measured at 1, 2 and 16 samples: 8 samples lie between 2 and 16."""
    known = profile([1, 8, 16], batch=16)

    def taking(costs: Costs, seconds: float) -> Costs:
        return costs.model_copy(update={"loss": LayerCost(forward=Timing(seconds=seconds))})

    costs = tuple(map(taking, known.costs, (8.0, 1.0, 1.0)))
    found = estimate(known.model_copy(update={"costs": costs}), 2).at(2)
    assert found.loss.forward.seconds == pytest.approx(4.0)
    exact = profile(2, batch=16).at(2)
    assert [cost.output_bytes for cost in found.layers] == [cost.output_bytes for cost in exact.layers]
    assert [tensor.bytes for tensor in found.saved] == [tensor.bytes for tensor in exact.saved]
