"""Values encoded as JSON are decoded with equal value and type; an error names the place of other values."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipepart.checkpoint.json_values import decode, encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = (
    st.text() | st.integers() | st.sampled_from(["$tuple", "$dict", "$bytes", ""]) | st.tuples(st.integers())
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
)


def types(value: Any) -> Any:
    """The value with the type of each part, as 1 == 1.0 == True."""
    if isinstance(value, dict):
        return type(value), [(types(key), types(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types(one) for one in value]
    return type(value), repr(value)


@settings(max_examples=10)
@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert types(decode(json.loads(json.dumps(encode(value, "value"))))) == types(value)


def test_numbers_of_numpy_and_ordered_dicts_become_plain_and_small_tensors_come_back() -> None:
    given = OrderedDict(a=np.float64(0.1), b=np.int32(3), c=np.bool_(True), d=float("inf"))
    found = decode(json.loads(json.dumps(encode(given, "value"))))
    assert types(found) == types({"a": 0.1, "b": 3, "c": True, "d": float("inf")})
    for one in (torch.tensor(0.1), torch.arange(6).view(2, 3).T, torch.ones(0, 2, dtype=torch.bfloat16)):
        (found,) = decode(json.loads(json.dumps(encode([one], "value"))))
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        assert found.equal(one)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"lr_lambdas": [len]}, r"value\['lr_lambdas'\]\[0\] is a builtin_function_or_method"),
        ({"a": (1, {2})}, r"value\['a'\]\[1\] is a set"),
        ({"best": torch.ones(1).to_sparse()}, r"value\['best'\] is sparse"),
        ([np.float32(1)], r"value\[0\] is a float32"),
        ({object(): 1}, "value is a object"),
    ],
)
def test_the_place_of_what_json_cannot_hold_is_named(value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        encode(value, "value")
