"""Hooks of every kind fire once a micro-batch, in its order, with the values of plain training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand

LOSS = nn.MSELoss()


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


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
@pytest.mark.parametrize("schedule", ["sequential", "1f1b", "zb-h1"])
def test_hooks_of_every_kind_fire_with_the_values_of_plain_training(schedule, recompute):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = plain.twin(model)
    ours, theirs = record(model), record(reference)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    with cut_by_hand(model, [1, 3], loss_fn=LOSS, schedule=schedule, recompute=recompute) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, LOSS, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    for name, tensors in theirs.items():
        if recompute == "never" or not name.startswith(("input", "output")):
            assert len(ours[name]) == len(tensors) == (0 if name == "incoming of 0" else 3), name
            assert all(map(torch.equal, ours[name], tensors)), name
