"""Training a part of a model: what is frozen costs no backward, and what is trained has its plain gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand

LOSS = nn.MSELoss()


class Probe(nn.Module):
    """Notes each backward that comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return _Noting.apply(x, self.seen)


class _Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[str]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append("backward")
        return gradients[0], None


def probed() -> nn.Sequential:
    """Four layers with a probe in front of each."""
    return nn.Sequential(*(module for _ in range(4) for module in (Probe(), nn.Linear(4, 4))))


def backwards(model: nn.Module) -> list[int]:
    return [len(module.seen) for module in model.modules() if isinstance(module, Probe)]


X, Y = torch.linspace(-2, 2, 28).reshape(7, 4), torch.linspace(-3, 4, 28).reshape(7, 4)


@pytest.mark.parametrize(("trained", "passed"), [(4, [0, 0, 0, 3]), (0, [0, 3, 3, 3])], ids=["back", "bias"])
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "always"), ("gpipe", "never"), ("zb-h1", "never")]
)
def test_what_is_frozen_in_front_runs_no_backward(schedule, recompute, trained, passed):
    """Two of four stages; the third goes backward down to its own weight. Or all but one bias, as in BitFit."""
    model = probed()
    if trained:
        model[:trained].requires_grad_(False)
    else:
        model.requires_grad_(False).get_parameter("1.bias").requires_grad_(True)
    with cut_by_hand(model, [2, 4, 6], loss_fn=LOSS, schedule=schedule, recompute=recompute) as pipe:
        plain.check_step(pipe, X, Y, LOSS)
    assert backwards(model) == passed
