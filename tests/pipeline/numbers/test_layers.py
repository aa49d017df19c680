"""Layers that change between steps, stand in several stages, are frozen or take inputs in other layouts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import plain
from tests.support.chains import cut_by_hand


def check_every_border(model: nn.Module, x: Any, y: Any, loss_fn: Any, layers: int) -> None:
    """Two stages, each border in turn: bit for bit the gradients and buffers of micro-batched training."""
    reference = plain.twin(model)
    norms = any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in model.modules()
    )
    # A micro-batch of a BatchNorm in training has two samples at least.
    parts = min(3, max(1, len(y) // 2) if norms else len(y))
    plain.micro_batched_step(reference, plain.copied(x), y, loss_fn, parts)
    for border in range(1, layers):
        ours = plain.twin(model)
        with cut_by_hand(ours, [border], loss_fn=loss_fn, micro_batches=3) as pipe:
            pipe.step(plain.copied(x), target=y)
        plain.assert_same(plain.gradients(ours), plain.gradients(reference))
        plain.assert_same(dict(ours.named_buffers()), dict(reference.named_buffers()))


class Double(nn.Module):
    """Writes over its input, and has no flag that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_writing_over_what_a_layer_has_saved_is_refused_as_torch_refuses_it():
    """A sigmoid needs its output in its backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Double())
    with (
        cut_by_hand(model, [2], loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_a_layer_that_writes_into_its_input_in_training_only():
    class InTraining(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) if self.training else x * 2

    model = nn.Sequential(nn.Linear(4, 4), InTraining(), nn.Linear(4, 4))
    reference = plain.twin(model)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        pipe.eval()
        pipe(x)
        pipe.train()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("samples", [1, 5, 12])
def test_batch_norm_sees_the_micro_batches_in_order(samples):
    """Running statistics and the count of batches are those of plain micro-batched training."""
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten()
    )
    x, y = torch.randn(samples, 1, 6, 6), torch.randn(samples, 8)
    check_every_border(model, x, y, nn.MSELoss(), 6)


@pytest.mark.parametrize("frozen", ["first", "middle", "last", "first two", "ends"])
def test_frozen_layers(frozen):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    positions = {"first": [0], "middle": [2, 3], "last": [4], "first two": [0, 2], "ends": [0, 4]}[frozen]
    for position in positions:
        model[position].requires_grad_(False)
    x, y = torch.randn(7, 4), torch.randint(3, (7,))
    reference = plain.gradients(model)
    check_every_border(model, x, y, nn.CrossEntropyLoss(), 5)
    with cut_by_hand(model, [2, 4], loss_fn=nn.CrossEntropyLoss()) as pipe:
        pipe.step(x, target=y)
    got = {name for name, gradient in plain.gradients(model).items() if gradient is not None}
    assert got == {name for name in reference if int(name.split(".")[0]) not in positions}


def test_a_model_frozen_as_a_whole_gives_its_loss_and_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).requires_grad_(False)
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, nn.functional.mse_loss(model(x), y), 1e-6)
    assert all(gradient is None for gradient in plain.gradients(model).values())


def test_freezing_between_steps_takes_effect():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss()) as pipe:
        for frozen in ([0], [1, 2], [], [0, 1]):
            for index, layer in enumerate(model):
                layer.requires_grad_(index not in frozen)
            reference = plain.twin(model)
            pipe.zero_grad()
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
            plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_the_input_may_be_a_nest():
    class Enter(nn.Module):
        def forward(self, nest: dict[str, Tensor]) -> Tensor:
            return nest["a"] * nest["b"]

    model = nn.Sequential(Enter(), nn.Linear(4, 4), nn.Linear(4, 2))
    x = {"a": torch.randn(7, 4), "b": torch.randn(7, 4)}
    check_every_border(model, x, torch.randn(7, 2), nn.MSELoss(), 3)


def test_integer_inputs():
    model = nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.Flatten(), nn.Linear(18, 4))
    check_every_border(model, torch.randint(9, (7, 3)), torch.randint(4, (7,)), nn.CrossEntropyLoss(), 4)


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(18, 4))
    reference = plain.twin(model)
    x, y = torch.randint(9, (7, 3)), torch.randint(4, (7,))
    with cut_by_hand(model, [1], loss_fn=nn.CrossEntropyLoss()) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.CrossEntropyLoss(), 3)
    ours, theirs = model[0].weight.grad, reference.get_parameter("0.weight").grad
    assert isinstance(ours, Tensor)
    assert isinstance(theirs, Tensor)
    assert ours.is_sparse
    assert ours.to_dense().equal(theirs.to_dense())


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided", "expanded"])
def test_inputs_in_any_layout(layout):
    x = torch.randn(6, 4, 8, 8)
    x = {
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(0, 1).contiguous().transpose(0, 1),
        "strided": lambda: torch.randn(12, 4, 8, 8)[::2],
        "expanded": lambda: x[:, :1].expand(6, 4, 8, 8),
    }[layout]()
    model = nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    check_every_border(model, x, torch.randn(6, 3), nn.MSELoss(), 5)


def test_a_layer_used_twice_within_a_stage():
    twice = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), twice, nn.Tanh(), twice, nn.Linear(4, 2))
    reference = plain.twin(model)
    x, y = torch.randn(7, 4), torch.randn(7, 2)
    with cut_by_hand(model, [1, 4], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_layer_without_state_may_stand_in_several_stages():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 2))
    check_every_border(model, torch.randn(7, 4), torch.randn(7, 2), nn.MSELoss(), 5)


def test_tied_weights_within_a_stage():
    class Head(nn.Module):
        def __init__(self, embedding: nn.Embedding) -> None:
            super().__init__()
            self.weight = embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight)

    embedding = nn.Embedding(9, 4)
    model = nn.Sequential(embedding, nn.Linear(4, 4), Head(embedding), nn.Flatten(), nn.Linear(27, 2))
    reference = plain.twin(model)
    x, y = torch.randint(9, (7, 3)), torch.randn(7, 2)
    with cut_by_hand(model, [3], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
