"""Splitting a mini-batch and putting it together again."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipepart.data.gather import gather
from pipepart.data.split import MicroBatches, batch_size, sizes, split


def gathered(outputs: list[Any], samples: list[int]) -> Any:
    return gather(outputs, MicroBatches(outputs, [None] * len(samples), samples, None))


@pytest.mark.parametrize(
    ("samples", "parts"), [(1, 1), (1, 3), (2, 2), (7, 3), (8, 3), (9, 3), (40, 7), (40, 39), (3, 40)]
)
def test_parts_put_together_are_the_whole(samples, parts):
    """Their sizes differ by one at most, and the larger come first."""
    parts = min(samples, parts)
    nest = {"a": torch.randn(samples, 3), "b": (torch.arange(samples), "name", None)}
    pieces, found = split(nest, parts), sizes(samples, parts)
    assert [len(piece["a"]) for piece in pieces] == found
    assert sum(found) == samples
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= 1
    whole = gathered(pieces, found)
    assert whole["a"].equal(nest["a"])
    assert whole["b"][0].equal(torch.arange(samples))
    assert whole["b"][1:] == ("name", None)


def test_parts_are_views():
    x = torch.zeros(6, 2)
    split(x, 3)[1].add_(1)
    assert x[:, 0].tolist() == [0, 0, 1, 1, 0, 0]


def test_tensors_without_dimensions_are_stacked():
    assert gathered([torch.tensor(1.0), torch.tensor(2.0)], [1, 1]).tolist() == [1.0, 2.0]
    only = torch.tensor(3.0)
    assert gathered([only], [1]).equal(only)


def test_the_size_of_a_batch_is_that_of_every_tensor():
    assert batch_size(torch.zeros(5, 2)) == 5
    assert batch_size({"a": torch.zeros(5), "b": [torch.zeros(5, 1), 3]}, (torch.zeros(5), None)) == 5


def test_gathered_outputs_keep_their_dtype():
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        parts: list[Tensor] = [torch.ones(2, dtype=dtype), torch.zeros(1, dtype=dtype)]
        assert gathered(parts, [2, 1]).dtype == dtype
