"""A backward on the calling thread, as is needed where an accelerator's autograd thread calls."""

import pytest
import torch
from torch import nn

from tests.support import plain
from tests.support.chains import Recompute, cut_by_hand


class OtherDevice:
    """Stands for a torch device that is no CPU: only its type is asked for."""

    type = "accelerator"


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_gradients_are_those_of_the_workers(recompute: Recompute, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    x, y = torch.randn(7, 4), torch.randn(7, 2)
    found = []
    for elsewhere in (False, True):
        model.zero_grad()
        with cut_by_hand(model, [1, 3], micro_batches=3, recompute=recompute) as pipe:
            output = pipe(x)
            if elsewhere:  # from here on every worker would wait for ever
                monkeypatch.setattr(pipe._stages[1], "device", OtherDevice())
                monkeypatch.setattr("pipepart.autograd.graph_cut.move", lambda message, device: message)
                monkeypatch.setattr(
                    "pipepart.autograd.graph_cut.move_gradients", lambda gradients, device: gradients
                )
                monkeypatch.setattr(
                    pipe._engine, "_run_on_workers", lambda step: pytest.fail("a worker was asked")
                )
            nn.functional.mse_loss(output, y).backward()
        found.append(plain.gradients(model))
    plain.assert_same(*found)
