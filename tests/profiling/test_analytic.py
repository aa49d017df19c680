"""Profiles without running: their bytes are those of a measured profile, and their times follow from a roofline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import CaptureError, Profile, Roofline
from pipepart.profiling import Costs
from tests.capture.families import FAMILIES
from tests.support.two_parts import SPLITS, Calls

CPU = Roofline(device="cpu", flops_per_second=5e10, bytes_per_second=1e10, seconds_per_operation=1e-5)


class Gated(nn.Module):
    """Blocks behind a mask that the model reads."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * 2 if mask.all() else x * mask[:, None]
        for block in self.blocks:
            x = block(x)
        return x


class Attention(nn.Module):
    """Scaled dot product attention of torch, with what decides about its kernel."""

    def __init__(self, dropout: float = 0.0, kind: str = "causal") -> None:
        super().__init__()
        self.qkv, self.kind, self.dropout = nn.Linear(16, 48), kind, dropout
        self.bias = nn.Parameter(torch.zeros(6, 6))
        self.allowed = torch.ones(6, 6, dtype=torch.bool).tril()  # neither a parameter nor a buffer

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = {"causal": None, "trained": self.bias, "allowed": self.allowed}[self.kind]
        found = nn.functional.scaled_dot_product_attention(q, k, v, mask, self.dropout, mask is None)
        return found.transpose(1, 2).flatten(2)


def reading(read: Callable[[Tensor], Any]) -> Calls:
    """A layer whose code reads what it computes."""
    return Calls(lambda x, linear: (y := linear(x), read(y))[0], linear=nn.Linear(4, 4))


def perceptron() -> tuple[Any, ...]:
    layers = (nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 5))
    return nn.Sequential(*layers), torch.randn(12, 8), torch.randint(5, (12,)), nn.CrossEntropyLoss()


def convolutions() -> tuple[Any, ...]:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(72, 4)), torch.randn(8, 3, 8, 8), torch.randn(8, 4), nn.MSELoss()


def attention(*args: Any) -> tuple[Any, ...]:
    return nn.Sequential(Attention(*args), Attention(*args)), torch.randn(4, 6, 16)


def gated(masked: int) -> tuple[Any, ...]:
    mask = torch.ones(8).index_fill(0, torch.arange(masked), 0.0)
    return Gated(nn.Linear(4, 4), nn.Linear(4, 4)), {"x": torch.randn(8, 4), "mask": mask}


def family(name: str) -> tuple[Any, ...]:
    build, sample = FAMILIES[name]
    return build(), sample()


MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "attention": attention,
    "attention, trained mask": lambda: attention(0.0, "trained"),
    "attention, constant mask": lambda: attention(0.0, "allowed"),
    "mask of ones": lambda: gated(0),
    "embedding": lambda: (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), torch.randint(9, (8, 3))),
    **{name: lambda name=name: family(name) for name in ("gpt2", "t5", "mixtral", "swin", "clip")},
}
QUICK = set(MODELS) - set(FAMILIES)


def profiled(given: tuple[Any, ...], **options: Any) -> Profile:
    target, loss_fn = (*given[2:], None, None)[:2]
    return pipepart.profile(given[0], given[1], target=target, loss_fn=loss_fn, **options)


def sizes(costs: Costs) -> Any:
    """All of the costs that is no time, without the workspace of forwards: kernels keep some numbers of their own."""
    others = {"forward", "backward_input", "backward_weight", "split_seconds", "forward_workspace_bytes"}
    layers = [cost.model_dump(exclude=others) for cost in (*costs.layers, costs.loss)]
    return layers, sorted(costs.saved, key=str)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_bytes_are_those_of_a_measured_profile(name: str) -> None:
    given = MODELS[name]()
    measured = profiled(given, micro_batches=2, devices=1, seconds=0)
    estimated = profiled(given, micro_batches=2, measure=False, roofline=CPU)
    assert estimated.layers == measured.layers
    assert (estimated.inputs, estimated.outputs) == (measured.inputs, measured.outputs)
    assert sizes(estimated.costs[0]) == sizes(measured.costs[0])
    for mine, its in zip(estimated.costs[0].layers, measured.costs[0].layers, strict=True):
        assert mine.forward_workspace_bytes == pytest.approx(its.forward_workspace_bytes, rel=0, abs=64)


@pytest.mark.parametrize("name", ["perceptron", "mask of ones", "attention, trained mask"])
def test_a_model_on_the_meta_device_has_the_profile_of_a_real_one(name: str) -> None:
    given = MODELS[name]()
    expected = profiled(given, measure=False, roofline=CPU)
    with torch.device("meta"):
        model = MODELS[name]()[0].train()
    assert profiled((model, *given[1:]), measure=False, roofline=CPU) == expected


class Clearing(Gated):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None
        return super().forward(x, mask.zero_())


def test_nothing_runs_and_nothing_changes() -> None:
    ran: list[str] = []
    model = Clearing(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.blocks[0].register_forward_hook(lambda layer, args, output: ran.append(output.device.type))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sample = (torch.randn(8, 4), torch.ones(8))
    state = torch.get_rng_state()
    pipepart.profile(model, sample, measure=False, roofline=CPU)
    assert set(ran) == {"meta"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert sample[1].all()


def test_times_follow_from_the_roofline() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU())
    flops, moved = 2 * 16 * 64 * 32, 4 * (16 * 64 + 64 * 32 + 16 * 32)
    for speed, each in (
        (Roofline(device="cpu", flops_per_second=1.0, bytes_per_second=1e15), flops),
        (Roofline(device="cpu", flops_per_second=1e15, bytes_per_second=1.0), moved),
        (Roofline(device="cpu", flops_per_second=1.0, bytes_per_second=1.0), max(flops, moved)),
    ):
        made = pipepart.profile(model, torch.randn(16, 64), measure=False, roofline=speed)
        linear, relu = made.costs[0].layers
        assert linear.forward.seconds == pytest.approx(each)
        if SPLITS:
            assert linear.backward_input.seconds == 0  # the sample needs no gradient
        assert linear.backward_seconds >= each
        assert relu.backward_weight.seconds == 0
    launch = Roofline(device="cpu", flops_per_second=1e15, bytes_per_second=1e15, seconds_per_operation=1.0)
    made = pipepart.profile(model, torch.randn(16, 64), measure=False, roofline=launch)
    assert [cost.forward.seconds for cost in made.costs[0].layers] == pytest.approx([1, 1])


def test_a_roofline_is_written_saved_and_read(tmp_path: Path) -> None:
    assert Roofline.parse("cpu: 50 GFLOP/s, 10 GB/s, 10 us") == CPU
    assert Roofline.parse("cuda: 312 TFLOP/s, 2.0 TB/s").seconds_per_operation == 0
    assert Roofline.parse(str(CPU)) == CPU
    CPU.save(tmp_path / "cpu.json")
    assert Roofline.load(tmp_path / "cpu.json") == CPU


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "branch": lambda x: 1 if x.sum() > 0 else 0,
    "mask": lambda x: x[x > 0],
    "numpy": lambda x: x.detach().numpy(),
    "another device": lambda x: x.cpu(),
}


@pytest.mark.parametrize(("read", "recorded"), [*((read, False) for read in READS), ("branch", True)])
def test_a_layer_that_reads_values_is_refused_by_name(read: str, recorded: bool) -> None:
    blocks = (nn.Linear(4, 4), reading(READS[read]))
    model, name = (Gated(*blocks), "blocks.1") if recorded else (nn.Sequential(*blocks), "1")
    with pytest.raises(CaptureError, match=rf"layer '{name}' .*measure=True"):
        pipepart.profile(model, torch.randn(8, 4), measure=False, roofline=CPU)


def test_a_sample_that_decides_is_no_tensor_on_meta() -> None:
    sample = {"x": torch.randn(8, 4), "mask": torch.ones(8, device="meta")}
    with pytest.raises(
        CaptureError, match=r"test_analytic\.py:\d+.*pass that in every process, on a real device"
    ):
        pipepart.profile(Gated(nn.Linear(4, 4)).to("meta"), sample, measure=False, roofline=CPU)


def test_an_accelerator_keeps_a_byte_for_each_element_that_is_dropped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    cuda = CPU.model_copy(update={"device": "cuda"})
    made = (pipepart.profile(model, torch.randn(8, 4), measure=False, roofline=one) for one in (CPU, cuda))
    saved = [profile.costs[0].layers[1].saved_bytes for profile in made]
    assert saved == [4 * 32, 32]
