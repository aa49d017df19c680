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

    def note(name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            found.setdefault(name, []).append(tensor.detach().clone())

    def halve(gradient: Tensor, name: str) -> Tensor:
        note(f"gradient of {name}", gradient)
        return gradient / 2

    for place in ("0", "1", "3"):
        layer = model.get_submodule(place)
        weight = layer.get_parameter("weight")

        def backward_hook(module: nn.Module, incoming: Any, outgoing: Any, place: str = place) -> Any:
            note(f"incoming of {place}", incoming[0])
            note(f"outgoing of {place}", outgoing[0])
            return None if incoming[0] is None else (incoming[0] * 1.5,)

        def forward_hook(module: nn.Module, given: Any, output: Tensor, place: str = place) -> None:
            note(f"input of {place}", given[0])
            note(f"output of {place}", output)
            output.register_hook(lambda gradient: note(f"gradient of the output of {place}", gradient))

        layer.register_forward_hook(forward_hook)
        layer.register_full_backward_pre_hook(lambda module, outgoing: (outgoing[0] * 2,))
        layer.register_full_backward_hook(backward_hook)
        weight.register_hook(lambda gradient, place=place: halve(gradient, place))
        weight.register_post_accumulate_grad_hook(lambda p, place=place: note(f"sum of {place}", p.grad))
    return found


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
    forward = {name for name in theirs if name.startswith(("input", "output"))}
    assert ours.keys() == theirs.keys()
    for name, tensors in theirs.items():
        if name not in forward or recompute == "never":
            assert len(ours[name]) == 3, name
            assert all(map(torch.equal, ours[name], tensors)), name
