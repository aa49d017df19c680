"""Layers that need real values or gradients in their forward are profiled as they train."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart

pytestmark = pytest.mark.usefixtures("short_profiles")


class Gradient(nn.Module):
    """Differentiates in its forward, as a physics-informed network does."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return slope + x


class Packed(nn.Module):
    """Sorts by lengths that it reads from the values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(4, 4, batch_first=True)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        embedded, lengths = given
        packed = nn.utils.rnn.pack_padded_sequence(
            embedded, lengths.tolist(), batch_first=True, enforce_sorted=False
        )
        return nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0].mean(dim=1)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, padding_idx=0)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens), (tokens != 0).sum(dim=1)


def tokens() -> Tensor:
    return torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9], [1, 0, 0, 0]])


CASES: dict[str, tuple[nn.Sequential, Any]] = {
    "gradients in a forward": (nn.Sequential(nn.Linear(4, 4), Gradient()), torch.ones(4, 4)),
    "lengths that are read": (nn.Sequential(Embedded(), Packed()), tokens()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_trains_is_profiled(case):
    model, sample = CASES[case]
    profile = pipepart.profile(
        model, sample, loss_fn=nn.MSELoss(), target=torch.zeros(4, 4), seconds=0, devices=1
    )
    assert [spec.shape for spec in profile.outputs] == [(4, 4)]
    assert all(cost.forward.seconds > 0 for cost in profile.costs[0].layers)


def test_a_loss_is_called_on_one_micro_batch_and_on_no_other_values():
    model, x, y = nn.Sequential(nn.Linear(4, 4)), torch.randn(6, 4), torch.randn(6, 4)
    expected, shown = model(x[:3]).detach(), y[:3].clone()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert output.detach().equal(expected)
        assert target.equal(shown)
        return nn.functional.mse_loss(output, target)

    pipepart.profile(model, x, loss_fn=loss, target=y, micro_batches=2, seconds=0)
