"""Whole ways through the library on a GPU that two workers share: a transformer, autocast, a GradScaler."""

from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from schedules import Kind
from tests.gpu import late
from tests.gpu.late import borders, late_chain
from tests.support import plain
from tests.support.on_devices import cut_on, gradients, sample

pytestmark = pytest.mark.usefixtures("short_profiles")

SHARED = ("cuda:0", "cuda:0")


def transformer() -> tuple[nn.Module, dict[str, Any]]:
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
    return model, {"input_ids": ids, "labels": ids}


def test_a_transformer_with_dropout_has_the_numbers_of_the_plain_model():
    model, batch = transformer()
    report = pipepart.check(model, batch, devices=SHARED, schedules=["gpipe", "1f1b", "zb-h1"], steps=2)
    assert report.ok, report


def test_a_planned_transformer_trains():
    model, batch = transformer()
    with pipepart.Pipeline.auto(model, batch, devices=SHARED) as pipe:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(pipe.step(**batch))
            optimizer.step()
    assert losses[-1].item() < 0.6 * losses[0].item()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_autocast_is_that_of_a_plain_loop(schedule):
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU()))).cuda()
    reference = plain.twin(model)
    x, y = torch.randn(64, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    autocast = torch.autocast("cuda", torch.bfloat16)
    with cut_on(SHARED, model, [4], nn.MSELoss(), schedule=schedule) as pipe, autocast:
        pipe.step(x, target=y)
    for xs, ys in zip(x.chunk(4), y.chunk(4), strict=True):
        with autocast:
            loss = nn.functional.mse_loss(reference(xs), ys) / 4
        loss.backward()
    plain.assert_close(gradients(model), gradients(reference), 1e-4)


def test_a_grad_scaler_skips_a_step_that_overflows_and_no_other():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 16, device="cuda"), torch.randn(16, 16, device="cuda")
    with cut_on(SHARED, model, [2], nn.MSELoss()) as pipe:
        for bad in (False, True, False):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                pipe.step(x * float("inf") if bad else x, target=y, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            same = [old.equal(new) for old, new in zip(before, model.parameters(), strict=True)]
            assert all(same) == bad
    assert scaler.get_scale() == 2.0**9


def test_a_trace_has_the_times_of_the_device():
    model = late_chain(2)
    with cut_on(SHARED, model, borders(2), nn.MSELoss(), trace=True) as pipe:
        x, y = sample(16, 64)
        for _ in range(3):
            pipe.step(x.cuda(), target=y.cuda())
        trace = pipe.last_trace
    assert trace is not None
    slept = late.CYCLES / 2.5e9  # seconds at a clock that no GPU has yet
    for row, starts, ends in zip(trace.schedule.actions, trace.starts, trace.ends, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        for action, start, end in zip(row, starts, ends, strict=True):
            # The first stage has no gradient for its input, so its backward does not go through its first layer.
            assert end - start > slept or (action.kind is Kind.B and action.stage == 0)
