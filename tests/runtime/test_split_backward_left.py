"""What a backward in two parts leaves to autograd, in the first part: hooks, checkpoints, transforms."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support import plain
from tests.support.two_parts import SPLITS, Calls, assert_same_as_fused, inputs, train


def test_hooks_on_tensors_on_the_way_change_both_parts():
    def layer(x: Tensor, a: Tensor) -> Tensor:
        y = F.linear(x, a)
        y.register_hook(lambda gradient: gradient * 3)
        y.grad_fn.register_prehook(lambda gradients: (gradients[0] + 1,))  # type: ignore[union-attr]
        return y.tanh()

    torch.manual_seed(0)
    assert_same_as_fused(Calls(layer, a=torch.randn(6, 6)), inputs(7, 6), 1)


def test_full_backward_hooks_of_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,))
    assert_same_as_fused(model, inputs(7, 6), 2)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameters_hook_is_called_once_a_backward_with_the_whole_gradient(kind: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    samples = inputs(7, 6)
    seen: dict[bool, list[Tensor]] = {False: [], True: []}
    outcomes = {}
    for split, calls in seen.items():
        copy = plain.twin(model)
        hook = getattr(copy.get_parameter("2.weight"), kind)
        hook(
            lambda tensor, calls=calls: calls.append((tensor if tensor.grad is None else tensor.grad).clone())
        )
        outcomes[split] = train(copy, samples, split)
    plain.assert_same(outcomes[True].weights, outcomes[False].weights)
    assert len(seen[True]) == 2
    assert all(found.equal(expected) for found, expected in zip(seen[True], seen[False], strict=True))
    assert outcomes[True].waited == (2 if SPLITS else 0)  # the layer without a hook


def test_hooks_that_wait_for_several_gradients_are_called():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    calls = []
    torch.autograd.graph.register_multi_grad_hook(
        tuple(model.parameters()), lambda got: calls.append(len(got))
    )
    train(model, inputs(7, 6), True)
    assert calls == [4, 4]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.outer = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize(("reentrant", "waits"), [(False, 1), (True, 0)])
def test_a_checkpoint_inside_is_left_to_autograd(reentrant: bool, waits: int):
    torch.manual_seed(0)
    assert_same_as_fused(Checkpointed(reentrant), inputs(7, 6), waits)


def test_tensors_saved_through_hooks_are_left_to_autograd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    assert_same_as_fused(model, inputs(7, 6), 0, lambda: torch.autograd.graph.save_on_cpu())


def test_a_gradient_penalty_inside():
    def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.linear(F.linear(x, a).tanh(), b)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square().sum()

    torch.manual_seed(0)
    weights = {"a": torch.randn(9, 6), "b": torch.randn(6, 9)}
    assert_same_as_fused(Calls(layer, **weights), inputs(7, 6), 0)


def test_function_transforms_inside():
    def layer(x: Tensor, a: Tensor) -> Tensor:
        per_sample = torch.vmap(lambda row: torch.func.grad(lambda r: F.linear(r, a).tanh().sum())(row))(x)
        return torch.vmap(lambda row: F.linear(row, a))(per_sample + x)

    torch.manual_seed(0)
    model = Calls(layer, a=torch.randn(9, 6))
    fused, ours = (train(plain.twin(model), inputs(7, 6), split) for split in (False, True))
    plain.assert_same(ours.weights, fused.weights)
    plain.assert_same(ours.inputs, fused.inputs)


def test_complex_weights_are_left_to_autograd():
    torch.manual_seed(0)
    model = nn.Linear(6, 5, dtype=torch.complex64)
    assert_same_as_fused(model, inputs(7, 6, dtype=torch.complex64), 0)


def test_a_stage_without_known_layers_has_no_second_part():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.PReLU())
    assert_same_as_fused(model, inputs(7, 6), 0)
