"""Steps and profiles on GPUs: the numbers of the plain model up to the order of sums, and the times of the device."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pipepart
from pipepart import Pipeline
from schedules import Kind
from tests.gpu import late
from tests.gpu.late import CYCLES, borders, late_chain
from tests.pipeline.conformance.runners import AMONG_DEVICES, CUDA, Mode, covering
from tests.pipeline.conformance.test_conformance import check
from tests.support.chains import on_device, plan_by_hand
from tests.support.on_devices import cut_on
from tests.support.pieces import WIDTH, linear
from tests.support.plain import assert_close, gradients, in_double, micro_batched_step, sample, twin

pytestmark = pytest.mark.usefixtures("short_profiles")


MODES = list(covering(random.Random(0), each=2, among=AMONG_DEVICES | {"home": list(CUDA)}))


def slowed(model: nn.Module) -> None:
    """Delay the GPU before each layer of a chain, in either direction, so that a missing wait shows in the numbers."""

    def sleep(*_: object) -> None:
        torch.cuda._sleep(CYCLES)

    def slow_backward(layer: nn.Module, given: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(sleep)

    for layer in model.children() if isinstance(model, nn.Sequential) else ():
        layer.register_forward_pre_hook(sleep)
        layer.register_forward_hook(slow_backward)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_pipeline_trains_as_the_plain_model(mode: Mode):
    if mode.home == "cuda on two" and torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    check(mode, change=slowed)


DEVICE = "cuda:0"
loss_fn = nn.MSELoss()


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.double() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("wish", [True, {"backend": "aot_eager"}], ids=str)
def test_compiled_stages_train_to_the_numbers_of_the_plain_model(wish):
    torch.compiler.reset()
    model = in_double(
        [linear(), nn.BatchNorm1d(WIDTH), nn.GELU(), linear(), nn.LayerNorm(WIDTH), linear()]
    ).to(DEVICE)
    plain = twin(model)
    plan = plan_by_hand([name for name, _ in model.named_children()], [3], micro_batches=4)
    pipe = Pipeline(model, on_device(plan, DEVICE), loss_fn, compile=wish)
    with pipe:
        for _ in range(5):
            x, y = (torch.randn(8, WIDTH).double().to(DEVICE) for _ in range(2))
            pipe.step(x, target=y)
            micro_batched_step(plain, x, y, loss_fn, 4)
            assert_close(gradients(model), gradients(plain), 1e-9)
            assert_close(statistics(model), statistics(plain), 1e-9)


SHARED = ("cuda:0", "cuda:0")


def test_a_transformer_with_dropout_has_the_numbers_of_the_plain_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=4,
        n_embd=64,
        n_head=4,
        n_positions=32,
        vocab_size=128,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).cuda()
    ids = torch.randint(128, (8, 32), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    report = pipepart.check(model, batch, devices=SHARED, schedules=["gpipe", "1f1b", "zb-h1"], steps=2)
    assert report.ok, report


def test_a_trace_has_the_times_of_the_device():
    model = late_chain(2)
    with cut_on(SHARED, model, borders(2), nn.MSELoss(), trace=True) as pipe:
        x, y = sample(16, 64)
        for _ in range(3):
            pipe.step(x.cuda(), target=y.cuda())
        trace = pipe.last_trace
    assert trace is not None
    slept = late.CYCLES / 2.5e9  # seconds at a clock that no GPU has yet
    for row in trace.rows:
        assert all(end <= start for (*_, end), (_, start, _) in pairwise(row))
        for action, start, end in row:
            # The first stage has no gradient for its input, so its backward does not go through its first layer.
            assert end - start > slept or (action.kind is Kind.B and action.stage == 0)


class Busy(nn.Module):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.register_buffer("matrix", torch.eye(4096))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = x @ self.get_buffer("matrix")
        return x


def test_ten_times_the_kernels_take_about_ten_times_as_long() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), Busy(2), Busy(20)).cuda()
    x = torch.randn(4096, 4096, device="cuda")
    profile = pipepart.profile(model, x, loss_fn=nn.MSELoss(), target=torch.zeros_like(x), seconds=0.2)
    _, short, long = profile.costs[0].layers
    assert 7 < long.forward.seconds / short.forward.seconds < 13
    assert 7 < long.backward_input.seconds / short.backward_input.seconds < 13
