"""Profiles on devices that run late time the device's work, and wait for it once a pass."""

import pytest
import torch
from torch import Tensor, nn

import pipepart


class Busy(nn.Module):
    """Multiplies by a matrix ``rounds`` times."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.register_buffer("matrix", torch.eye(128))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = x @ self.get_buffer("matrix")
        return x


def test_layers_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    wait = torch.accelerator.synchronize

    def counted(device: torch.device) -> None:
        waits.append(device)
        wait(device)

    monkeypatch.setattr(torch.accelerator, "synchronize", counted)
    model = nn.Sequential(nn.Linear(128, 128), Busy(2), Busy(40)).to("vdev:0")
    x = torch.randn(128, 128, device="vdev:0")
    profile = pipepart.profile(model, x, loss_fn=nn.MSELoss(), target=torch.zeros_like(x), seconds=0)
    costs = profile.costs[0]
    assert (profile.device, profile.threads) == ("vdev:0", None)
    assert len(waits) == costs.repeats
    linear, short, long = costs.layers
    assert long.forward.seconds > 2 * short.forward.seconds > 0
    assert long.backward_input.seconds > 2 * short.backward_input.seconds > 0
    assert linear.backward_seconds > 0
    assert (linear.saved_bytes, short.saved_bytes) == (x.nbytes, 0)
