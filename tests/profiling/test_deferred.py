"""What waits between the two parts of a layer's backward, in bytes, against what is known of torch's layers by hand."""

import torch
from torch import Tensor, nn

import pipepart
from tests.support.two_parts import splits

N, D = 32, 24
ACTIVATION = N * D * 4


def waiting(*modules: nn.Module, x: Tensor | None = None) -> list[int]:
    profile = pipepart.profile(
        nn.Sequential(*modules), torch.randn(N, D) if x is None else x, seconds=0, devices=1, progress=False
    )
    return [layer.deferred_bytes for layer in profile.costs[0].layers]


@splits
def test_a_linear_layer_keeps_its_input_and_the_gradient_of_its_output():
    assert waiting(nn.Linear(D, D), nn.Linear(D, 2 * D)) == [2 * ACTIVATION, 3 * ACTIVATION]


@splits
def test_a_convolution_keeps_its_input_and_the_gradient_of_its_output():
    x = torch.randn(4, 3, 8, 8)
    assert waiting(nn.Conv2d(3, 5, 3, padding=1), x=x) == [4 * 4 * (3 + 5) * 8 * 8]


@splits
def test_an_embedding_keeps_its_indices_and_the_gradient_of_its_output():
    x = torch.zeros(N, 4, dtype=torch.int64)
    assert waiting(nn.Embedding(10, D), x=x) == [8 * N * 4 + 4 * N * 4 * D]


def test_layers_whose_weights_do_not_wait_keep_nothing():
    frozen = nn.Linear(D, D).requires_grad_(False)
    assert waiting(nn.LayerNorm(D), nn.GELU(), frozen, nn.Tanh()) == [0, 0, 0, 0]


@splits
def test_an_input_that_several_weights_of_a_layer_need_counts_once():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.one(x)) + torch.cos(self.other(x))

    assert waiting(Two()) == [3 * ACTIVATION]


@splits
def test_parameters_and_buffers_that_are_inputs_do_not_count():
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(N, D)
            self.register_buffer("positions", torch.arange(N))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table(self.positions)

    assert waiting(Positions()) == [ACTIVATION]
