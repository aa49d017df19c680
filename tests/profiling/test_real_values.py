"""Layers and losses are profiled on the values that they have in training, with gradients."""

import pytest
import torch
from torch import Tensor, nn

import pipepart
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")


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
