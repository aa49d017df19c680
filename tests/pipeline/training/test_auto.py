"""``Pipeline.auto`` trains with what the planner chooses."""

from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from tests.support import plain

pytestmark = pytest.mark.usefixtures("short_profiles")


@pytest.mark.parametrize("recompute", ["except-last", "always"])
def test_auto_hands_the_choice_of_recompute_to_the_planner(recompute):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    reference = plain.twin(model)
    x, y = torch.randn(12, 4), torch.randn(12, 2)
    options: dict[str, Any] = {"devices": 2, "schedule": "1f1b", "recompute": recompute}
    with pipepart.Pipeline.auto(model, x, target=y, loss_fn=nn.MSELoss(), micro_batches=3, **options) as pipe:
        assert {stage.recompute for stage in pipe.plan.stages} == {recompute}
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_auto_recomputes_where_memory_does_not_do_else():
    """Wide activations, few parameters; each device has room for the inputs of all micro-batches and one stash."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 256), nn.Linear(256, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).tanh().exp())

    model = nn.Sequential(*[Wide() for _ in range(4)])
    reference = plain.twin(model)
    x, y = torch.randn(512, 4), torch.randn(512, 4)
    options: dict[str, Any] = {"target": y, "loss_fn": nn.MSELoss(), "micro_batches": 8, "schedule": "gpipe"}
    profile = pipepart.profile(model, x, target=y, loss_fn=nn.MSELoss(), micro_batches=8)
    even = pipepart.plan(
        profile, pipepart.Cluster.virtual(2), schedule="gpipe", recompute="never", cut_before=["2"]
    )
    unlimited = max(even.predicted.memory_bytes)
    cluster = pipepart.Cluster.virtual(2, memory=unlimited * 3 // 4)
    with pipepart.Pipeline.auto(model, x, devices=cluster, **options) as pipe:
        assert {stage.recompute for stage in pipe.plan.stages} & {"except-last", "always"}
        model.zero_grad()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 8)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
