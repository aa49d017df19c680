"""Layers of every sort train under a split backward as they do in one, wherever the border falls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand


def test_an_embedding_tied_to_a_head_in_its_stage():
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False), nn.Linear(7, 2))
    model[2].weight = model[0].weight
    reference = plain.twin(model)
    x, y = torch.randint(7, (9, 5)), torch.randn(9, 5, 2)
    with cut_by_hand(model, [3], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("frozen", ["first stage", "second stage", "all", "ends", "but norms"])
def test_frozen_layers(frozen):
    model = nn.Sequential(
        nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)
    )
    places = {
        "first stage": (0, 1, 2),
        "second stage": (3, 4, 5),
        "all": range(6),
        "ends": (0, 5),
        "but norms": (0, 2, 3, 5),
    }[frozen]
    for place in places:
        model[place].requires_grad_(False)
    reference = plain.twin(model)
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    with cut_by_hand(model, [3], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
    if frozen != "all":
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_hooks_fire_once_a_micro_batch_with_the_values_of_one_backward():
    """On parameters, on tensors and on modules, of layers of both stages."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    seen: dict[str, list[tuple[str, Tensor]]] = {}
    for schedule in ("1f1b", "zb-h1"):
        ours = plain.twin(model)
        calls = seen[schedule] = []
        hook_all_sorts(ours, calls)
        with cut_by_hand(ours, [3], loss_fn=nn.MSELoss(), micro_batches=4, schedule=schedule) as pipe:
            pipe.step(x, target=y)
    for name in {name for name, _ in seen["1f1b"]}:
        expected, found = ([g for n, g in seen[schedule] if n == name] for schedule in seen)
        assert len(found) == 4
        assert all(one.equal(other) for one, other in zip(expected, found, strict=True))
    assert {name for name, _ in seen["zb-h1"]} == {
        "parameter",
        "accumulated",
        "module",
        "tensor",
        "last tensor",
    }


def hook_all_sorts(model: nn.Module, calls: list[tuple[str, Tensor]]) -> None:
    def note(name: str) -> Callable[[Tensor], None]:
        return lambda tensor: calls.append((name, tensor.clone()))

    def note_output(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: nn.Module, given: Any, output: Tensor) -> None:
            output.register_hook(note(name))

        return hook

    model.get_parameter("1.weight").register_hook(note("parameter"))
    accumulated = model.get_parameter("2.bias")
    accumulated.register_post_accumulate_grad_hook(lambda p: note("accumulated")(p.grad))  # type: ignore[arg-type]
    model.get_submodule("4").register_full_backward_hook(lambda module, given, got: note("module")(got[0]))
    model.get_submodule("1").register_forward_hook(note_output("tensor"))
    model.get_submodule("5").register_forward_hook(note_output("last tensor"))
