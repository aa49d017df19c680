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
    reference = plain.twin(model)
    with cut_by_hand(model, [2, 4, 6], loss_fn=LOSS, schedule=schedule, recompute=recompute) as pipe:
        pipe.step(X, target=Y)
    assert backwards(model) == passed
    plain.micro_batched_step(reference, X, Y, LOSS, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_frozen_front_stages_hand_on_messages_without_a_graph():
    class Watch(nn.Linear):
        asked = False

        def forward(self, input: Tensor) -> Tensor:
            self.asked = input.requires_grad
            return super().forward(input)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Watch(4, 4), Watch(4, 4))
    model[:2].requires_grad_(False)
    with cut_by_hand(model, [1, 2, 3], loss_fn=LOSS, micro_batches=1) as pipe:
        pipe.step(X, target=Y)
    assert [layer.asked for layer in model[2:]] == [False, True]


def test_layers_are_thawed_one_after_the_other():
    """From the last to the first, as in gradual unfreezing, and frozen again."""
    model = probed()
    with cut_by_hand(model, [2, 4, 6], loss_fn=LOSS) as pipe:
        for trained in ([7], [5, 7], [3, 5, 7], [1, 3, 5, 7], [1], [3, 7]):
            for index in (1, 3, 5, 7):
                model[index].requires_grad_(index in trained)
            for module in model:
                if isinstance(module, Probe):
                    module.seen.clear()
            pipe.zero_grad()
            reference = plain.twin(model)
            pipe.step(X, target=Y)
            passed = [3 if any(layer < index for layer in trained) else 0 for index in (0, 2, 4, 6)]
            assert backwards(model) == passed
            plain.micro_batched_step(reference, X, Y, LOSS, 3)
            plain.assert_same(plain.gradients(model), plain.gradients(reference))
