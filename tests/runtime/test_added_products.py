"""A product of matrices is added in one pass where that gives the bits of a product and a sum, and nowhere else."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipepart.autograd import fused_addmm, graph_cut, split_backward
from pipepart.autograd.fused_addmm import add_product
from tests.support.two_parts import Calls, assert_same_as_fused, inputs, splits


def _matrices(rows: int, inner: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(inner)
    gradient, given = torch.randn(inner, rows, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
    return torch.randn(rows, columns, dtype=dtype), gradient.t(), given


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inner", [1, 7, 32, 64, 256, 512, 1000])
def test_what_is_added_has_the_bits_of_a_product_and_a_sum(inner: int, dtype: torch.dtype) -> None:
    into, left, right = _matrices(512, inner, 300, dtype)
    expected = into + left @ right
    before = into.clone()
    assert torch.equal(into, expected if add_product(into, left, right) else before)


def test_few_rows_are_added_in_one_pass() -> None:
    into, left, right = _matrices(512, 32, 512, torch.float32)
    assert add_product(into, left, right)


def misaligned(matrix: Tensor) -> Tensor:
    """The matrix in memory that starts 4 bytes behind a multiple of 64."""
    return torch.cat([torch.zeros(1), matrix.flatten()])[1:].view(matrix.shape)


@pytest.mark.parametrize("fault", ["small", "dtype", "by column", "into", "left", "right"])
def test_other_matrices_are_left_alone(fault: str) -> None:
    size = 16 if fault == "small" else 512
    into, left, right = _matrices(size, 32, size, torch.bfloat16 if fault == "dtype" else torch.float32)
    if fault == "by column":
        into = into.t()
    if fault == "into":
        into = misaligned(into)
    if fault == "left":
        left = misaligned(left.t()).t()
    if fault == "right":
        right = misaligned(right)
    before = into.clone()
    assert not add_product(into, left, right)
    assert torch.equal(into, before)


def test_trying_draws_no_random_numbers_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_addmm, "_equal", {})
    into, left, right = _matrices(512, 32, 512, torch.float32)
    state = torch.random.get_rng_state()
    add_product(into, left, right)
    assert torch.equal(state, torch.random.get_rng_state())


def _layers(kind: str) -> tuple[nn.Module, list[Tensor], int]:
    """A model, its samples, and how many of its weights are added in one pass for each but the first."""
    dtype = torch.float64 if kind == "double" else torch.float32
    linear = nn.Linear(384, 384, dtype=dtype)
    samples = inputs(32, 384, dtype=dtype)
    if kind == "by row":
        return Calls(lambda x, w: x @ w, w=torch.randn(384, 384)), samples, 1
    if kind == "used twice":
        return nn.Sequential(linear, nn.Tanh(), linear), samples, 0
    if kind == "scaled":
        return Calls(lambda x, w: functional.linear(x, w * 2), w=torch.randn(384, 384)), samples, 0
    if kind == "no bias":
        return nn.Sequential(nn.Linear(384, 384, bias=False), nn.Tanh()), samples, 1
    return nn.Sequential(linear, nn.Tanh(), nn.Linear(384, 384, dtype=dtype)), samples, 2


@splits
@pytest.mark.parametrize("kind", ["single", "double", "by row", "no bias", "used twice", "scaled"])
def test_weights_have_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples, expected = _layers(kind)
    added = []
    monkeypatch.setattr(
        split_backward, "add_product", lambda *given: added.append(add_product(*given)) or added[-1]
    )
    assert_same_as_fused(model, samples, expected)
    dtype = samples[0].dtype
    rounds_alike = add_product(*_matrices(384, 32, 384, dtype))  # depends on the processor
    assert sum(added) == (expected if rounds_alike else 0)


@splits
def test_a_gradient_that_was_set_apart_is_added_to_in_place() -> None:
    model = nn.Linear(384, 384)
    flat = torch.zeros(384 * 384)
    model.weight.grad = flat.view(384, 384)
    message, roots = graph_cut.cut(model(torch.randn(32, 384)))
    split_backward.backward_inputs(roots, [torch.ones_like(message)]).accumulate()
    assert model.weight.grad.data_ptr() == flat.data_ptr()
    assert flat.abs().sum() > 0
