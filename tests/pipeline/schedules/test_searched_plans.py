"""Plans with free placement and an order of their own train and evaluate as the plain model does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional

import pipepart
from pipepart import Cluster, Pipeline, Plan
from tests.support import plain
from tests.support.pieces import WIDTH
from tests.support.searched import names_of, network, random_order, searched_plan

pytestmark = pytest.mark.usefixtures("short_profiles")

# Placements that looped and V-shaped schedules do not have.
PLACEMENTS: dict[str, Sequence[int]] = {
    "one stage between two of another device": (0, 1, 0),
    "one and four": (0, 0, 1, 0, 0),
    "neighbours on one device": (0, 0, 1, 1, 2),
    "wave": (0, 1, 2, 2, 1, 0, 0, 1, 2),
    "looped with a stage left over": (0, 1, 0, 1, 0),
    "all on one": (0, 0, 0, 0),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_has_exact_numbers(placement):
    """A full mini-batch, an uneven one, one of fewer micro-batches than planned; between these two an evaluation."""
    homes = PLACEMENTS[placement]
    choose = random.Random(placement)
    order = random_order(choose, homes, 4)
    borders = sorted(choose.sample(range(1, 10), len(homes) - 1))
    model = network()
    plan = searched_plan(names_of(model), borders, order, spare=len(homes) % 2)
    reference = plain.twin(model)
    with Pipeline(model, plan, nn.MSELoss(), strict=placement == "one and four") as pipe:
        for step, count in enumerate((8, 9, 6)):
            x, y = torch.randn(count, WIDTH), torch.randn(count, WIDTH)
            torch.manual_seed(step)
            loss = pipe.step(x, target=y)
            torch.manual_seed(step)
            parts = min(4, count // 2)
            expected = plain.micro_batched_step(reference, x, y, nn.MSELoss(), parts, drawing=True)
            plain.assert_near(loss, expected, 1e-6, "loss")
            plain.assert_same(plain.gradients(model), plain.gradients(reference))
            plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
            if step == 1:
                value, output = pipe.evaluate(x, target=y, return_outputs=True)
                with torch.no_grad():
                    wanted = reference.eval()(x)
                reference.train()
                torch.testing.assert_close(output, wanted)
                torch.testing.assert_close(value, functional.mse_loss(wanted, y))


def test_a_plan_with_an_order_of_its_own_is_refreshed_and_measured():
    actions = (("0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    model = plain.in_double(nn.Linear(5, 5) for _ in range(3))
    x, y = torch.randn(8, 5).double(), torch.randn(8, 5).double()
    profile = pipepart.profile(model, x, target=y, loss_fn=nn.MSELoss(), micro_batches=2, seconds=0.0)
    stages = [
        pipepart.planning.StagePlan(layers=(str(stage),), device=f"virtual:{device}")
        for stage, device in enumerate([0, 1, 0])
    ]
    plan = Plan(
        stages=tuple(stages),
        cluster=Cluster.virtual(2),
        schedule="search",
        micro_batches=2,
        actions=actions,
        profile=profile,
    )
    with Pipeline(model, plan, loss_fn=nn.MSELoss(), trace=True) as pipe:
        pipe.step(x, target=y)
        assert pipe.last_trace is not None
        assert pipepart.replan(plan.refreshed(), pipe.last_trace).predicted.step_seconds > 0
