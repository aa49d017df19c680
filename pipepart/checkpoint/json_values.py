"""Encodes Python values as JSON and decodes them with the same types: tuples, bytes, counters, any dict keys.

Plain JSON has lists, dicts with keys of text, numbers, text and null. The others are a dict with one key::

    tuple    {"$tuple": [1, 2]}                bytes    {"$bytes": "base64"}
    Counter  {"$counter": [[30, 1], [60, 1]]}  tensor   {"$tensor": ["int64", [3], "base64"]}
    dict     {"$dict": [[30, 1], [60, 1]]}     if a key is no text, or begins with "$"
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..input_error import InputTypeError
from .writing import bytes_of, check_tensor

_MOST_BYTES = 2**20  # of a tensor in the JSON


def encode(value: Any, place: str) -> Any:
    """Encode a value as plain JSON; refuse what JSON cannot hold. ``place`` names the value in messages.

    Numbers, text, bytes, None, tensors of up to 1 MiB, and lists, tuples, dicts and counters of them are encoded.
    """

    def inner(item: Any, key: Any = None) -> Any:
        return encode(item, place if key is None else f"{place}[{key!r}]")

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.float64 | np.integer | np.bool_):
        return value.item()
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is list:
        return [inner(element, index) for index, element in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [inner(element, index) for index, element in enumerate(value)]}
    if type(value) in (dict, OrderedDict, Counter):
        items = [[inner(key), inner(element, key)] for key, element in value.items()]
        if type(value) is Counter:
            return {"$counter": items}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(items)
        return {"$dict": items}
    if isinstance(value, Tensor):
        return {"$tensor": _numbers(value, place)}
    raise InputTypeError(
        f"{place} is a {type(value).__name__}, which JSON cannot hold: numbers, text, bytes, None, and lists, tuples "
        "and dicts of them can be saved"
    )


def decode(value: Any) -> Any:
    """Decode a result of :func:`encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    match kind:
        case "$bytes":
            return base64.b64decode(value[kind])
        case "$tuple":
            return tuple(decode(value[kind]))
        case "$counter":
            return Counter(dict(decode(value[kind])))
        case "$dict":
            return dict(decode(value[kind]))
        case "$tensor":
            dtype, shape, content = value[kind]
            flat = torch.tensor(list(base64.b64decode(content)), dtype=torch.uint8)
            return flat.view(getattr(torch, dtype)).reshape(shape)
    return {key: decode(item) for key, item in value.items()}


def _numbers(tensor: Tensor, place: str) -> list[Any]:
    check_tensor(place, tensor)
    if tensor.nbytes > _MOST_BYTES:
        raise InputTypeError(
            f"{place} is a tensor of {tensor.nbytes} bytes: up to {_MOST_BYTES} can be saved there"
        )
    content = base64.b64encode(bytes_of(tensor)).decode("ascii")
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content]
