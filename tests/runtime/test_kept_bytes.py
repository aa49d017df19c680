"""What a traced step counts that devices keep is what was planned, where layers save what they did when profiled."""

from typing import Literal

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Pipeline, Profile
from tests.support.chains import Recompute, cut_by_hand
from tests.support.saving import saving_network

pytestmark = pytest.mark.usefixtures("short_profiles")

X, Y = torch.linspace(-2, 2, 64 * 16).view(64, 16), torch.arange(64) % 16


@pytest.fixture(scope="module")
def profile() -> Profile:
    return pipepart.profile(
        saving_network(), X, loss_fn=nn.CrossEntropyLoss(), target=Y, micro_batches=8, seconds=0.01, threads=1
    )


@pytest.mark.parametrize(
    ("schedule", "chunks", "mode"),
    [
        ("gpipe", 1, "except-last"),
        ("zb-h1", 1, "offload"),
        ("interleaved-1f1b", 2, "offload"),
        ("1f1b", 1, "never"),
        ("1f1b", 1, "always"),
        ("zb-h1", 1, "except-last"),
        ("interleaved-1f1b", 2, "always"),
    ],
)
def test_the_measured_peak_is_the_planned_one(
    profile: Profile, schedule: str, chunks: int, mode: Recompute | Literal["offload"]
):
    plan = pipepart.plan(
        profile,
        pipepart.Cluster.virtual(2, threads=1),
        schedule=schedule,
        recompute="never" if mode == "offload" else mode,
        offload="stash" if mode == "offload" else "never",
        chunks=chunks,
        cut_before=["3", "6", "9"] if chunks == 2 else ["6"],
    )
    with Pipeline(saving_network(), plan, nn.CrossEntropyLoss()) as pipe:
        pipe.step(X, target=Y)
        pipe.zero_grad()
        with pipe.trace(memory=True) as trace:
            pipe.step(X, target=Y)
    assert trace.median.peak_bytes == plan.simulate().peak_bytes


def test_counting_changes_no_number():
    torch.manual_seed(0)
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    found = []
    for memory in (False, True):
        torch.manual_seed(1)
        model = saving_network()
        with cut_by_hand(model, [5], loss_fn=nn.MSELoss(), micro_batches=2) as pipe:
            with pipe.trace(memory=memory):
                pipe.step(x, target=y)
            found.append([parameter.grad for parameter in pipe.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_nothing_is_counted_unless_it_is_asked_for():
    with cut_by_hand(saving_network(), [5], loss_fn=nn.MSELoss(), trace=True) as pipe:
        pipe.step(torch.randn(8, 16), target=torch.randn(8, 16))
        assert pipe.last_trace is not None
        assert pipe.last_trace.peak_bytes == ()
