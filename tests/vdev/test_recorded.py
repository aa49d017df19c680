"""Recorded models on devices with memories of their own: recorded devices and constants follow the stage."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support.chains import plan_by_hand
from tests.support.on_devices import on_devices
from tests.support.recorded import chain_for, plainly


class Placed(nn.Module):
    """Makes tensors on the device of others between its blocks, and keeps a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(6))
        self.table = torch.linspace(0.5, 1.5, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = x
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) * self.scale
            x = x + torch.arange(6, device=x.device) / 6 + torch.zeros_like(first) + number * mask
            x = x * self.table.to(x.device)
        return x + first


@pytest.mark.parametrize("length", [8, 5])
def test_devices_follow_the_stages(length):
    torch.manual_seed(0)
    model = Placed()
    plain = copy.deepcopy(model)
    x, mask, y = torch.randn(8, 6), torch.randn(8, 6).round(), torch.randn(8, 6)
    loss_fn = nn.functional.mse_loss
    chain = chain_for(model, (x, mask), loss_fn=loss_fn)
    names = [name for name, _ in chain.layers]
    plan = plan_by_hand(names, [1, 3], micro_batches=2)
    plan = on_devices(plan, ("vdev:0", "vdev:1", "vdev:2"))
    with Pipeline(chain, plan, loss_fn) as pipe:
        loss = pipe.step(x[:length], mask[:length], target=y[:length])
        assert {str(p.device) for p in model.parameters()} == {"vdev:0", "vdev:1", "vdev:2"}
    expected = plainly(plain, (x[:length], mask[:length]), target=y[:length], loss_fn=loss_fn)
    torch.testing.assert_close(loss.cpu(), expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad)
