"""Clipping gives the numbers of the plain model's clipping."""

import pytest
import torch
from torch import nn

from tests.support import plain
from tests.support.chains import cut_by_hand


def pair() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 5, bias=False), nn.Linear(5, 3)
    )
    return model, plain.twin(model)


X, Y = torch.linspace(-2, 2, 42).reshape(7, 6), torch.linspace(-3, 4, 21).reshape(7, 3)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_the_norm_is_that_of_the_plain_model(norm_type, foreach):
    model, reference = pair()
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(X, target=Y)
        norm = pipe.clip_grad_norm_(0.1, norm_type, foreach=foreach)
    plain.micro_batched_step(reference, X, Y, nn.MSELoss(), 3)
    assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type, foreach=foreach))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_values_are_clamped():
    model, reference = pair()
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(X, target=Y)
        pipe.clip_grad_value_(0.01)
    plain.micro_batched_step(reference, X, Y, nn.MSELoss(), 3)
    nn.utils.clip_grad_value_(reference.parameters(), 0.01)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked_for():
    model, _ = pair()
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(X * float("inf"), target=Y)
        assert not pipe.clip_grad_norm_(1.0).isfinite()
        with pytest.raises(RuntimeError, match=r"non-finite"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_model_without_gradients_has_the_norm_zero():
    model, _ = pair()
    with cut_by_hand(model, [1, 3]) as pipe:
        assert pipe.clip_grad_norm_(1.0) == 0
