"""A profile is a value of one micro-batch's costs: saved, loaded, estimated between sizes; other calls are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import pipepart
from pipepart import CaptureError, Profile, Roofline
from pipepart.document import FORMAT_VERSION
from pipepart.planning.costs.interpolate import estimate
from pipepart.profiling import Costs, LayerCost, Timing
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")


def measured(width: int = 8) -> Profile:
    model = nn.Sequential(nn.Linear(4, width), nn.Sequential(nn.ReLU(), nn.Linear(width, 2)))
    x, y = torch.randn(12, 4), torch.randint(2, (12,))
    loss_fn = nn.CrossEntropyLoss()
    return pipepart.profile(model, x, loss_fn=loss_fn, target=y, micro_batches=[3, 1], seconds=0, devices=1)


def test_a_profile_loads_as_the_same_value_with_a_fingerprint_of_its_layers(tmp_path):
    profile = measured()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    data = json.loads((tmp_path / "profile.json").read_text())
    assert data["version"] == FORMAT_VERSION
    assert profile.fingerprint == measured().fingerprint != measured(width=9).fingerprint
    data["costs"][0]["saved"] = []
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(
        ValueError, match=r"profile.json is not a Profile(.|\n)*saved_bytes 192, and .* have 0"
    ):
        Profile.load(tmp_path / "profile.json")


def test_a_profile_has_costs_by_number_of_micro_batches():
    profile = measured()
    assert [costs.micro_batches for costs in profile.costs] == [1, 3]
    assert profile.at(3) is profile.costs[1]
    assert list(profile.graph.edges) == [("0", "1.0"), ("1.0", "1.1")]
    with pytest.raises(ValueError, match=r"measured for \[1, 3\] micro-batches, not for 2"):
        profile.at(2)


def slope(x: Tensor) -> Tensor:
    """Differentiates in its forward, as a physics-informed network does."""
    (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    return slope + x


def test_a_layer_may_differentiate_in_its_forward():
    model = nn.Sequential(nn.Linear(4, 4), Calls(slope))
    given = {"loss_fn": nn.MSELoss(), "target": torch.zeros(4, 4)}
    profile = pipepart.profile(model, torch.ones(4, 4), **given, seconds=0, devices=1)
    assert [spec.shape for spec in profile.outputs] == [(4, 4)]
    assert all(cost.forward.seconds > 0 for cost in profile.costs[0].layers)


def test_layers_and_the_loss_see_one_micro_batch_and_no_other_values():
    def seen(value: Tensor) -> Tensor:
        assert value.detach().equal(expected)
        return value * 1

    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert target.equal(shown)
        return nn.functional.mse_loss(seen(output), target)

    model, x, y = nn.Sequential(nn.Linear(4, 4), Calls(seen)), torch.randn(6, 4), torch.randn(6, 4)
    expected, shown = model[0](x[:3]).detach(), y[:3].clone()
    pipepart.profile(model, x, loss_fn=loss, target=y, micro_batches=2, seconds=0)


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


CPU = Roofline.parse("cpu: 50 GFLOP/s, 10 GB/s, 10 us")
ESTIMATED: dict[str, Any] = {"measure": False, "roofline": CPU}


def loss_fn(output: Tensor) -> Tensor:
    raise AssertionError("the loss was computed")


def sharded(layers: Mapping[str, nn.Module], mesh: Any) -> None:
    for layer in layers.values():
        fully_shard(layer, mesh=mesh["dp"])


# Keywords, and a part of the message.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"optimizer": "lion"}, ValueError, "optimizer 'lion' is not known: .*'adam'"),
    ({"loss_fn": loss_fn, "micro_batches": (2, 100)}, ValueError, "=100 is more than the mini-batch has samples, 8"),
    ({"threads": 0}, ValueError, r"threads must be between 1 and \d+ .*, got 0"),
    ({"threads": 100_000}, ValueError, r"threads must be between 1 and \d+ .*, got 100000"),
    ({"device": "meta"}, ValueError, 'device="meta" has nothing to measure'),
    ({"device": "cuda:99"}, ValueError, "there is no cuda:99 here"),
    ({"roofline": CPU}, ValueError, "measure=False"),
    ({"measure": False}, ValueError, r"roofline=pipepart\.Roofline\.parse"),
    ({"measure": False, "roofline": str(CPU)}, TypeError, r"write Roofline\.parse"),
    ({**ESTIMATED, "device": "cpu"}, ValueError, "leave one out"),
    ({"tensor": 2}, TypeError, "give parallelize=f, as for pipepart.Pipeline; got None"),
    ({"tensor": 0, "parallelize": sharded}, ValueError, "tensor must be a whole number of at least 1, got 0"),
    (
        {"tensor": 2, "parallelize": sharded, "seconds": 0.0},
        ValueError,
        r"called fully_shard on '0'.*shard=True.*mesh\['dp'\].size",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "error", "message"), REFUSED, ids=lambda _: "")
def test_a_call_is_refused(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipepart.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), **keywords)
    assert not dist.is_initialized()


def test_what_has_no_estimate_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4)
    with pytest.raises(ValueError, match="autocast"), torch.autocast("cpu"):
        pipepart.profile(model, x, **ESTIMATED)
    with pytest.raises(CaptureError, match="recurrent"):
        pipepart.profile(nn.Sequential(nn.GRU(4, 4)), x[:, None], **ESTIMATED)
    for text in ("312 TFLOP/s", "cuda: 0 TFLOP/s, 2.0 TB/s", "cuda: 1.2.3 TFLOP/s, 2.0 TB/s"):
        with pytest.raises(ValueError, match="is not a roofline: write for example"):
            Roofline.parse(text)


def test_a_process_group_in_use_is_left_alone() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(ValueError, match=r"torch\.distributed is in use here: profile before"):
            pipepart.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), tensor=2, parallelize=sharded)
        assert dist.get_world_size() == 4
    finally:
        dist.destroy_process_group()
