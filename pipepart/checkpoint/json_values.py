"""Encodes Python values as JSON and decodes them with the same types: tuples, bytes, counters, any dict keys.

Plain JSON has lists, dicts with keys of text, numbers, text and null. The others are a dict with one key::

    tuple    {"$tuple": [1, 2]}                bytes    {"$bytes": "base64"}
    Counter  {"$counter": [[30, 1], [60, 1]]}  tensor   {"$tensor": "name in the file of tensors"}
    dict     {"$dict": [[30, 1], [60, 1]]}     if a key is no text, or begins with "$"
    tensor   {"$numbers": ["int64", [3], "base64"]}     dtype, shape and bytes, where there is no file of tensors
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..input_error import InputTypeError
from .writing import bytes_of, check_tensor

Store = Callable[[str, Tensor], str]  # keeps a tensor that was found at a place; returns its name

_MOST_BYTES = 2**20  # of a tensor in the JSON


def encode(value: Any, place: str, store: Store | None = None) -> Any:
    """Encode a value as plain JSON.

    Args:
        value: numbers, text, bytes, None, and nests of them in lists, tuples, dicts and counters.
        place: names the value in messages, ``"scheduler"`` for example.
        store: called for tensors; None to write them into the JSON, up to 1 MiB each.

    Raises:
        TypeError: JSON cannot hold the value at the place that the message names.
    """

    def inner(one: Any, key: Any = None) -> Any:
        return encode(one, place if key is None else f"{place}[{key!r}]", store)

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.float64 | np.integer | np.bool_):
        return value.item()
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is list:
        return [inner(one, index) for index, one in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [inner(one, index) for index, one in enumerate(value)]}
    if type(value) in (dict, OrderedDict, Counter):
        items = [[inner(key), inner(one, key)] for key, one in value.items()]
        if type(value) is Counter:
            return {"$counter": items}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(items)
        return {"$dict": items}
    if isinstance(value, Tensor):
        return {"$tensor": store(place, value)} if store else {"$numbers": _numbers(value, place)}
    raise InputTypeError(
        f"{place} is a {type(value).__name__}, which JSON cannot hold: numbers, text, bytes, None, and lists, tuples "
        "and dicts of them can be saved"
    )


def decode(value: Any, read: Callable[[str], Any] | None = None) -> Any:
    """Decode a result of :func:`encode`.

    Args:
        value: plain JSON.
        read: returns what to put in place of the tensor of a name.
    """
    if isinstance(value, list):
        return [decode(one, read) for one in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    match kind:
        case "$bytes":
            return base64.b64decode(value[kind])
        case "$tuple":
            return tuple(decode(value[kind], read))
        case "$counter":
            return Counter(dict(_pairs(value[kind], read)))
        case "$dict":
            return dict(_pairs(value[kind], read))
        case "$numbers":
            dtype, shape, content = value[kind]
            flat = torch.tensor(list(base64.b64decode(content)), dtype=torch.uint8)
            return flat.view(getattr(torch, dtype)).reshape(shape)
        case "$tensor":
            assert read is not None, value
            return read(value[kind])
    return {key: decode(one, read) for key, one in value.items()}


def _numbers(tensor: Tensor, place: str) -> list[Any]:
    check_tensor(place, tensor)
    if tensor.nbytes > _MOST_BYTES:
        raise InputTypeError(
            f"{place} is a tensor of {tensor.nbytes} bytes: up to {_MOST_BYTES} can be saved there"
        )
    content = base64.b64encode(bytes_of(tensor)).decode("ascii")
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content]


def _pairs(items: Any, read: Callable[[str], Any] | None) -> list[tuple[Any, Any]]:
    return [(decode(key, read), decode(one, read)) for key, one in items]
