"""Losses of many kinds are those of the whole mini-batch, or are refused: no loss gives other numbers."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipepart.loss import LossError, value_of
from tests.loss import by_parts
from tests.loss.odd_losses import LOSSES, REFUSED


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("micro_batches", [2, 3, 4, 6])
@pytest.mark.parametrize("name", LOSSES)
def test_gives_the_numbers_of_the_mini_batch_or_is_refused(name: str, micro_batches: int) -> None:
    loss_fn, batch, *verdict = LOSSES[name]
    torch.manual_seed(len(name))
    x, y = batch()
    for all_forwards_first in (False, True):
        given = tree_map(Tensor.clone, y)
        try:
            ours, gradients = by_parts.by_parts(
                loss_fn, x, given, micro_batches, all_forwards_first=all_forwards_first
            )
        except LossError:
            assert verdict, "is refused"
            continue
        assert verdict != [REFUSED], "is not refused"
        theirs, leaves = by_parts.whole(loss_fn, x, tree_map(Tensor.clone, y))
        assert ours.isfinite() == theirs.isfinite()
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13, equal_nan=True)
        torch.testing.assert_close(gradients, leaves, rtol=1e-11, atol=1e-13, equal_nan=True)


def test_a_pair_is_the_mean_of_its_sums() -> None:
    total, count = torch.tensor(6.0), torch.tensor(3)
    assert value_of((total, count)) == 2
