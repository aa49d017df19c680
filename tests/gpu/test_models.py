"""On a GPU that two workers share: a transformer with dropout, and the times of a trace."""

import pytest
import torch
from torch import nn

import pipepart
from schedules import Kind
from tests.gpu import late
from tests.gpu.late import borders, late_chain
from tests.support.on_devices import cut_on, sample

pytestmark = pytest.mark.usefixtures("short_profiles")

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
    for row, starts, ends in zip(trace.schedule.actions, trace.starts, trace.ends, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        for action, start, end in zip(row, starts, ends, strict=True):
            # The first stage has no gradient for its input, so its backward does not go through its first layer.
            assert end - start > slept or (action.kind is Kind.B and action.stage == 0)
