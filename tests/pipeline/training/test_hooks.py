"""Backwards as in plain training: hooks of every kind fire once a micro-batch; what is frozen runs none."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.in_backward import CallsInBackward

LOSS = nn.MSELoss()
X, Y = torch.linspace(-2, 2, 28).reshape(7, 4), torch.linspace(-3, 4, 28).reshape(7, 4)


def record(model: nn.Module) -> dict[str, list[Tensor]]:
    """Put hooks on layers, parameters and tensors, some of which change what they see; return what they see."""
    found: dict[str, list[Tensor]] = {}
    for place in ("0", "1", "3"):
        # A list of its own for each hook: layers that share values are no chain of layers.
        for what in ("input", "output", "incoming", "outgoing", "gradient of the output", "gradient", "sum"):
            found[f"{what} of {place}"] = []
        hook(model.get_submodule(place), {name: seen for name, seen in found.items() if name[-1] == place})
    return found


def hook(layer: nn.Module, found: dict[str, list[Tensor]]) -> None:
    (inputs, outputs, incoming, outgoing, of_output, gradients, sums) = found.values()

    def forward_hook(module: nn.Module, given: Any, output: Tensor) -> None:
        inputs.append(given[0].detach().clone())
        outputs.append(output.detach().clone())
        output.register_hook(lambda gradient: of_output.append(gradient.clone()))

    def backward_hook(module: nn.Module, coming: Any, going: Any) -> Any:
        incoming.extend([] if coming[0] is None else [coming[0].clone()])
        outgoing.append(going[0].clone())
        return None if coming[0] is None else (coming[0] * 1.5,)

    def halve(gradient: Tensor) -> Tensor:
        gradients.append(gradient.clone())
        return gradient / 2

    layer.register_forward_hook(forward_hook)
    layer.register_full_backward_pre_hook(lambda module, going: (going[0] * 2,))
    layer.register_full_backward_hook(backward_hook)
    weight = layer.get_parameter("weight")
    weight.register_hook(halve)
    weight.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.clone()))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("1f1b", "never"), ("zb-h1", "never"), ("sequential", "except-last"), ("zb-h1", "always")],
)
def test_hooks_of_every_kind_fire_with_the_values_of_plain_training(schedule, recompute):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = plain.twin(model)
    ours, theirs = record(model), record(reference)
    with cut_by_hand(model, [1, 3], loss_fn=LOSS, schedule=schedule, recompute=recompute) as pipe:
        pipe.step(X, target=Y)
    plain.micro_batched_step(reference, X, Y, LOSS, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    for name, tensors in theirs.items():
        if recompute == "never" or not name.startswith(("input", "output")):
            assert len(ours[name]) == len(tensors) == (0 if name == "incoming of 0" else 3), name
            assert all(map(torch.equal, ours[name], tensors)), name


class Probe(nn.Module):
    """Notes each backward that comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return CallsInBackward.apply(x, partial(self.seen.append, 1))


@pytest.mark.parametrize(
    ("trained", "passed"),
    [(("5.weight", "5.bias", "7.weight", "7.bias"), [0, 0, 0, 3]), (("1.bias",), [0, 3, 3, 3])],
)
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "always"), ("gpipe", "never"), ("zb-h1", "never")]
)
def test_what_is_frozen_in_front_runs_no_backward(schedule, recompute, trained, passed):
    """The last two of four layers train, or one bias alone, as in BitFit; a probe is in front of each layer."""
    model = nn.Sequential(*(module for _ in range(4) for module in (Probe(), nn.Linear(4, 4))))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    with cut_by_hand(model, [2, 4, 6], loss_fn=LOSS, schedule=schedule, recompute=recompute) as pipe:
        plain.check_step(pipe, X, Y, LOSS)
    assert [len(module.seen) for module in model.modules() if isinstance(module, Probe)] == passed
