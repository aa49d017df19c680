"""Profiles on a GPU time its kernels, not their launch."""

import pytest
import torch
from torch import Tensor, nn

import pipepart

pytestmark = pytest.mark.usefixtures("short_profiles")


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
