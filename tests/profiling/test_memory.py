"""Bytes of a layer, against what is known of torch's layers by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipepart
from pipepart.profiling import Costs

N, D = 32, 24
FLOAT = 4
ACTIVATION = N * D * FLOAT


def costs_of(*modules: nn.Module, x: Tensor | None = None, **options: Any) -> Costs:
    model = nn.Sequential(*modules)
    sample = torch.randn(N, D) if x is None else x
    return pipepart.profile(model, sample, seconds=0, devices=1, progress=False, **options).costs[0]


def saved_by(*modules: nn.Module, **options: Any) -> list[int]:
    return [layer.saved_bytes for layer in costs_of(*modules, **options).layers]


def stash(costs: Costs) -> int:
    """What one stage with all layers keeps of a micro-batch, its input included."""
    return sum(piece.bytes for piece in costs.saved if piece.layers or 0 in piece.input_of)


def linear() -> nn.Linear:
    return nn.Linear(D, D)


def test_a_trained_linear_saves_its_input_and_not_its_weight():
    assert saved_by(linear(), linear()) == [ACTIVATION, ACTIVATION]


def test_a_frozen_linear_saves_nothing():
    assert saved_by(linear(), linear().requires_grad_(False), linear()) == [ACTIVATION, 0, ACTIVATION]


def test_layers_before_the_first_trained_one_save_nothing():
    frozen = linear().requires_grad_(False)
    assert saved_by(frozen, nn.Tanh(), nn.BatchNorm1d(D, affine=False), linear()) == [0, 0, 0, ACTIVATION]


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.ReLU(inplace=True)])
def test_an_activation_saves_its_output_once_with_the_layer_behind_it(activation):
    """The linear layer after it saves the same memory as its input: a stage of both pays once."""
    costs = costs_of(linear(), activation, linear())
    assert [layer.saved_bytes for layer in costs.layers] == [ACTIVATION] * 3
    assert stash(costs) == 2 * ACTIVATION


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.Softplus()])
def test_an_activation_whose_derivative_needs_the_input_saves_that(activation):
    costs = costs_of(linear(), activation, nn.Identity())
    assert [layer.saved_bytes for layer in costs.layers][1:] == [ACTIVATION, 0]
    assert costs.layers[1].saved_bytes == ACTIVATION


def test_batch_norm_saves_its_input_and_two_numbers_a_channel():
    assert saved_by(linear(), nn.BatchNorm1d(D))[1] == ACTIVATION + 2 * D * FLOAT


def test_layer_norm_saves_its_input_and_two_numbers_a_row():
    assert saved_by(linear(), nn.LayerNorm(D))[1] == ACTIVATION + 2 * N * FLOAT


def test_dropout_saves_its_mask_in_training_and_nothing_in_evaluation():
    assert saved_by(linear(), nn.Dropout())[1] in (ACTIVATION, ACTIVATION // FLOAT)
    assert saved_by(linear(), nn.Dropout().eval())[1] == 0


def test_max_pooling_saves_its_input_and_the_places_it_took():
    x = torch.randn(2, 3, 8, 8)
    saved = saved_by(nn.Conv2d(3, 3, 1), nn.MaxPool2d(2), x=x)[1]
    assert saved == x.nbytes + 2 * 3 * 4 * 4 * 8


def test_views_save_nothing_and_share_their_memory():
    costs = costs_of(linear(), nn.Unflatten(1, (4, 6)), nn.Flatten(), nn.Identity(), linear())
    assert [layer.saved_bytes for layer in costs.layers] == [ACTIVATION, 0, 0, 0, ACTIVATION]
    assert stash(costs) == 2 * ACTIVATION


def test_a_view_of_part_of_a_tensor_keeps_the_whole():
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, : D // 2]

    assert saved_by(linear(), Half(), nn.Linear(D // 2, 3))[2] == ACTIVATION


def test_memory_that_a_layer_saves_several_times_counts_once():
    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.view(-1).view(N, D) * 1.0 + x.t().t() * x

    assert saved_by(linear(), Cube())[1] in (ACTIVATION, 2 * ACTIVATION)
    assert saved_by(linear(), nn.Identity())[1] == 0


def test_an_embedding_saves_its_indices():
    x = torch.randint(10, (N, 5))
    costs = costs_of(nn.Embedding(10, 4), x=x)
    assert costs.layers[0].saved_bytes == N * 5 * 8
    assert (costs.layers[0].input_bytes, costs.layers[0].output_bytes) == (N * 5 * 8, N * 5 * 4 * FLOAT)


def test_graphs_that_a_forward_drops_are_not_saved():
    class Discards(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x.exp().exp().sum()
            return x * 2

    assert saved_by(linear(), Discards()) == [ACTIVATION, 0]


def test_double_precision_takes_twice_as_much():
    assert saved_by(linear().double(), nn.Tanh(), x=torch.randn(N, D).double()) == [2 * ACTIVATION] * 2


def test_checkpointed_layers_save_their_input_alone():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*[layer for _ in range(4) for layer in (linear(), nn.Tanh())])

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    assert stash(costs_of(linear(), Checkpointed())) == 2 * ACTIVATION


def test_what_the_loss_saves_counts_with_the_last_layer():
    y = torch.randn(N, D)
    alone = saved_by(linear(), nn.Identity())
    with_loss = saved_by(linear(), nn.Identity(), loss_fn=nn.MSELoss(), target=y)
    assert alone == [ACTIVATION, 0]
    assert with_loss[0] == ACTIVATION
    assert with_loss[1] in (ACTIVATION, 2 * ACTIVATION)  # output and target


def test_inputs_and_outputs_of_nests_are_summed():
    class Fork(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return x * 2, {"half": x[:, : D // 2] * 1, "flag": x > 0}

    class Join(nn.Module):
        def forward(self, nest: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
            return nest[0].sum(dim=1)

    fork, join = costs_of(Fork(), Join()).layers
    assert fork.input_bytes == ACTIVATION
    assert fork.output_bytes == join.input_bytes == ACTIVATION + ACTIVATION // 2 + N * D
    assert join.output_bytes == N * FLOAT


def test_costs_are_those_of_the_largest_micro_batch():
    profile = pipepart.profile(
        nn.Sequential(linear(), linear()), torch.randn(10, D), micro_batches=[1, 3, 10], seconds=0.01
    )
    assert [(costs.micro_batches, costs.samples) for costs in profile.costs] == [(1, 10), (3, 4), (10, 1)]
    for costs in profile.costs:
        assert [layer.saved_bytes for layer in costs.layers] == [costs.samples * D * FLOAT] * 2


def test_a_large_intermediate_is_seen_as_needed_for_a_while():
    """Ten activations at once that nothing keeps: the peak holds them, the stash does not."""

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.repeat(1, 10).sum(dim=1, keepdim=True)
            return x * 2 + 0 * scale

    wide = costs_of(linear(), Wide(), linear()).layers[1]
    assert wide.saved_bytes == 0
    assert 10 * ACTIVATION <= (wide.forward_workspace_bytes or 0) <= 14 * ACTIVATION


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("AdamW", 2)])
def test_optimizer_state_of_trained_parameters(optimizer, states):
    model = nn.Sequential(linear(), linear().requires_grad_(False))
    profile = pipepart.profile(model, torch.randn(N, D), optimizer=optimizer, seconds=0)
    size = (D * D + D) * FLOAT
    assert [layer.parameter_bytes for layer in profile.layers] == [size, size]
    assert [layer.gradient_bytes for layer in profile.layers] == [size, 0]
    assert [profile.optimizer_bytes(layer) for layer in profile.layers] == [states * size, 0]
    assert profile.optimizer == optimizer.lower()


def test_a_sparse_buffer_is_none_of_what_is_saved():
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("graph", torch.eye(D).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.get_buffer("graph"), x.t()).t()

    costs = costs_of(linear(), Graph(), linear())
    assert costs.layers[1].saved_bytes == 0
    assert costs.layers[1].output_bytes == ACTIVATION


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_that_is_saved_counts_with_its_places(layout: torch.layout):
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = (x.detach()[:, :N] > 10).float()
            mask[0, 0] = 1
            sparse = mask.to_sparse(layout=layout)
            return torch.sparse.mm(sparse, x)

    _, layer = costs_of(nn.Linear(N, N), Masked(), x=torch.randn(N, N)).layers
    places = 2 * 8 if layout is torch.sparse_coo else (N + 1 + 1) * 8
    assert layer.saved_bytes >= places + FLOAT
