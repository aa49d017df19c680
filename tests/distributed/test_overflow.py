"""Overflow of gradients is found in any of them, whatever their types are."""

import pytest
import torch

from pipepart.distributed.overflow import overflows


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 1])
def test_one_number_that_is_not_finite_is_found(place: int, value: float):
    gradients = [torch.ones(3, dtype=torch.float16), torch.ones(2, 2)]
    assert not overflows(gradients)
    gradients[place].view(-1)[-1] = value
    assert overflows(gradients)


def test_no_gradients_do_not_overflow():
    assert not overflows([])
