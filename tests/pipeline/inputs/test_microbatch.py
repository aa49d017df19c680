"""Splitting a mini-batch and putting it together again."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipepart.data.gather import gather
from pipepart.data.split import MicroBatches, batch_size, sizes, split


def gathered(outputs: list[Any], samples: list[int]) -> Any:
    return gather(outputs, MicroBatches(outputs, [None] * len(samples), samples, None))


@given(samples=st.integers(1, 40), parts=st.integers(1, 40))
@settings(deadline=None, derandomize=True)
def test_parts_put_together_are_the_whole(samples, parts):
    parts = min(samples, parts)
    nest = {"a": torch.randn(samples, 3), "b": (torch.arange(samples), "name", None)}
    pieces = split(nest, parts)
    assert len(pieces) == parts
    whole = gathered(pieces, sizes(samples, parts))
    assert whole["a"].equal(nest["a"])
    assert whole["b"][0].equal(torch.arange(samples))
    assert whole["b"][1:] == ("name", None)


@given(samples=st.integers(1, 40), parts=st.integers(1, 40))
@settings(deadline=None, derandomize=True)
def test_sizes_differ_by_one_at_most_and_the_larger_come_first(samples, parts):
    parts = min(samples, parts)
    found = sizes(samples, parts)
    assert sum(found) == samples
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= 1
    assert [len(piece) for piece in split(torch.zeros(samples), parts)] == found


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


@pytest.mark.parametrize(
    ("sample", "target", "kind"),
    [
        (torch.zeros(3), torch.zeros(4), ValueError),
        ((torch.zeros(3), torch.zeros(4)), None, ValueError),
        (torch.tensor(3.0), None, ValueError),
        (torch.zeros(0, 3), None, ValueError),
        ([], None, TypeError),
    ],
)
def test_batches_that_cannot_be_split(sample, target, kind):
    with pytest.raises(kind):
        batch_size(sample, target)


def test_an_exception_tells_the_two_sizes():
    with pytest.raises(ValueError, match=r"target\['y'\] has 4 samples where the input has 3"):
        batch_size(torch.zeros(3), {"y": torch.zeros(4)})


def test_gathered_outputs_keep_their_dtype():
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        parts: list[Tensor] = [torch.ones(2, dtype=dtype), torch.zeros(1, dtype=dtype)]
        assert gathered(parts, [2, 1]).dtype == dtype
