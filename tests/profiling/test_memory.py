"""Bytes that a layer keeps, sends and works with, against what is known of torch's layers by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipepart
from pipepart.profiling import Costs
from tests.support.two_parts import Calls, splits

pytestmark = pytest.mark.usefixtures("short_profiles")

N, D = 32, 24
FLOAT = 4
ACTIVATION = N * D * FLOAT


def costs_of(*modules: nn.Module, x: Tensor | None = None, **options: Any) -> Costs:
    model = nn.Sequential(*modules)
    sample = torch.randn(N, D) if x is None else x
    return pipepart.profile(model, sample, seconds=0, devices=1, progress=False, **options).costs[0]


def stash(costs: Costs) -> int:
    """What one stage with all layers keeps of a micro-batch, its input included."""
    return sum(piece.bytes for piece in costs.saved if piece.layers or 0 in piece.input_of)


def linear() -> nn.Linear:
    return nn.Linear(D, D)


def frozen() -> nn.Linear:
    return linear().requires_grad_(False)


def no_gradient(x: Tensor) -> Tensor:
    for _ in range(5):
        x.exp().exp().sum()
    return x * 2


# What each layer saves: a trained linear layer its input, and not its weight.
SAVED: dict[str, tuple[list[nn.Module], list[int]]] = {
    "trained": ([linear(), linear()], [ACTIVATION, ACTIVATION]),
    "frozen": ([linear(), frozen(), linear()], [ACTIVATION, 0, ACTIVATION]),
    "before the first trained one": (
        [frozen(), nn.Tanh(), nn.BatchNorm1d(D, affine=False), linear()],
        [0, 0, 0, ACTIVATION],
    ),
    "the input of a derivative": ([linear(), nn.GELU(), nn.Identity()], [ACTIVATION, ACTIVATION, 0]),
    "two numbers a channel": ([linear(), nn.BatchNorm1d(D)], [ACTIVATION, ACTIVATION + 2 * D * FLOAT]),
    "two numbers a row": ([linear(), nn.LayerNorm(D)], [ACTIVATION, ACTIVATION + 2 * N * FLOAT]),
    "dropout in evaluation": ([linear(), nn.Dropout().eval()], [ACTIVATION, 0]),
    "views": (
        [linear(), nn.Unflatten(1, (4, 6)), nn.Flatten(), nn.Identity(), linear()],
        [ACTIVATION, 0, 0, 0, ACTIVATION],
    ),
    "a view of part of a tensor": (
        [linear(), Calls(lambda x: x[:, : D // 2]), nn.Linear(D // 2, 3)],
        [ACTIVATION, 0, ACTIVATION],
    ),
    "graphs that a forward drops": ([linear(), Calls(no_gradient)], [ACTIVATION, 0]),
}


@pytest.mark.parametrize("case", SAVED)
def test_what_layers_save(case):
    layers, expected = SAVED[case]
    assert [layer.saved_bytes for layer in costs_of(*layers).layers] == expected


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.ReLU(inplace=True)])
def test_an_activation_saves_its_output_once_with_the_layer_behind_it(activation):
    """The linear layer after it saves the same memory as its input: a stage of both pays once."""
    costs = costs_of(linear(), activation, linear())
    assert [layer.saved_bytes for layer in costs.layers] == [ACTIVATION] * 3
    assert stash(costs) == 2 * ACTIVATION


def test_a_dropout_saves_its_mask_and_a_pooling_its_input_and_the_places_it_took():
    assert costs_of(linear(), nn.Dropout()).layers[1].saved_bytes in (ACTIVATION, ACTIVATION // FLOAT)
    x = torch.randn(2, 3, 8, 8)
    saved = costs_of(nn.Conv2d(3, 3, 1), nn.MaxPool2d(2), x=x).layers[1].saved_bytes
    assert saved == x.nbytes + 2 * 3 * 4 * 4 * 8


def test_checkpointed_layers_save_their_input_alone():
    inner = nn.Sequential(*[layer for _ in range(4) for layer in (linear(), nn.Tanh())])
    checkpointed = Calls(lambda x, inner: checkpoint(inner, x, use_reentrant=False), inner=inner)
    assert stash(costs_of(linear(), checkpointed)) == 2 * ACTIVATION


def test_what_the_loss_saves_counts_with_the_last_layer():
    costs = costs_of(linear(), nn.Identity(), loss_fn=nn.MSELoss(), target=torch.randn(N, D))
    assert costs.layers[0].saved_bytes == ACTIVATION
    assert costs.layers[1].saved_bytes in (ACTIVATION, 2 * ACTIVATION)  # output and target


def test_a_large_intermediate_is_seen_as_needed_for_a_while():
    """Ten activations at once that nothing keeps: the peak holds them, the stash does not."""

    def wide(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.repeat(1, 10).sum(dim=1, keepdim=True)
        return x * 2 + 0 * scale

    layer = costs_of(linear(), Calls(wide), linear()).layers[1]
    assert layer.saved_bytes == 0
    assert 10 * ACTIVATION <= (layer.forward_workspace_bytes or 0) <= 14 * ACTIVATION


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("AdamW", 2)])
def test_optimizer_state_of_trained_parameters(optimizer, states):
    model = nn.Sequential(linear(), frozen())
    profile = pipepart.profile(model, torch.randn(N, D), optimizer=optimizer, seconds=0)
    size = (D * D + D) * FLOAT
    assert [layer.parameter_bytes for layer in profile.layers] == [size, size]
    assert [layer.gradient_bytes for layer in profile.layers] == [size, 0]
    assert [profile.optimizer_bytes(layer) for layer in profile.layers] == [states * size, 0]
    assert profile.optimizer == optimizer.lower()


TWO = Calls(lambda x, one, other: torch.sin(one(x)) + torch.cos(other(x)), one=linear(), other=linear())
POSITIONS = Calls(lambda x, inner, at: x * inner(at), inner=linear(), at=nn.Buffer(torch.randn(N, D)))

# What waits between the two parts of a backward: inputs of weights, and gradients of outputs.
DEFERRED: dict[str, tuple[list[nn.Module], Tensor, list[int]]] = {
    "linear": ([linear(), nn.Linear(D, 2 * D)], torch.randn(N, D), [2 * ACTIVATION, 3 * ACTIVATION]),
    "convolution": ([nn.Conv2d(3, 5, 3, padding=1)], torch.randn(4, 3, 8, 8), [4 * 4 * (3 + 5) * 8 * 8]),
    "an embedding, which does not wait": ([nn.Embedding(10, D)], torch.zeros(N, 4, dtype=torch.int64), [0]),
    "weights that do not wait": ([nn.LayerNorm(D), nn.GELU(), frozen()], torch.randn(N, D), [0, 0, 0]),
    "one input of two weights": ([TWO], torch.randn(N, D), [3 * ACTIVATION]),
    "a buffer as input": ([POSITIONS], torch.randn(N, D), [ACTIVATION]),
}


@splits
@pytest.mark.parametrize("case", DEFERRED)
def test_what_waits_between_the_parts_of_a_backward_whatever_the_callers_mode(case):
    layers, x, expected = DEFERRED[case]
    with torch.inference_mode():
        costs = costs_of(*layers, x=x)
    assert [layer.deferred_bytes for layer in costs.layers] == expected


def test_a_sparse_tensor_that_is_saved_counts_with_its_places():
    def masked(x: Tensor) -> Tensor:
        mask = (x.detach()[:, :N] > 10).float()
        mask[0, 0] = 1
        return torch.sparse.mm(mask.to_sparse(), x)

    _, layer = costs_of(nn.Linear(N, N), Calls(masked), x=torch.randn(N, N)).layers
    assert layer.saved_bytes >= 2 * 8 + FLOAT
