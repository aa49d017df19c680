"""Nests: containers of tensors, such as the inputs and outputs of layers.

A nest is any value that torch's pytree can flatten: tuples, lists, dicts and registered classes. A
dataclass with tensors is registered at its first use. Any other object that holds tensors is refused, because its
tensors would be missed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..input_error import InputTypeError

IsLeaf = Callable[[Any], bool]

_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def check_nest(nest: Any, what: str, help: str, is_leaf: IsLeaf | None = None) -> None:
    """Register the dataclasses in a nest with pytree; raise an error for other objects that hold tensors.

    Args:
        nest: a tensor, or a nest of tensors and other values.
        what: name of the nest, for the error.
        help: advice for the error.
        is_leaf: returns True for values that are not searched.

    Raises:
        TypeError: it holds an object with tensors that pytree does not take apart.
    """
    if isinstance(nest, Tensor):
        return
    for leaf in register_dataclasses(nest, is_leaf):
        raise InputTypeError(
            f"{what} holds a {type(leaf).__name__}, an object with tensors that cannot be taken apart: {help}"
        )


def register_dataclasses(nest: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """Register the dataclasses in a nest with pytree, and return the other objects that hold tensors.

    Args:
        nest: a nest of tensors and other values.
        is_leaf: returns True for values that are not searched.
    """
    kinds = []
    for leaf in pytree.tree_leaves(nest, is_leaf=is_leaf):
        if isinstance(leaf, (Tensor, *_SCALARS)) or (is_leaf is not None and is_leaf(leaf)):
            continue
        if not holds_tensors(leaf):
            continue
        if _is_plain_dataclass(leaf):
            if type(leaf) not in pytree.SUPPORTED_NODES:  # which a leaf before it may be, too
                _register(type(leaf))
            kinds += register_dataclasses(leaf, is_leaf)
        else:
            kinds.append(leaf)
    return kinds


def holds_tensors(value: Any) -> bool:
    """Return True if a pytree leaf that is not a tensor has tensors in its attributes or items."""
    return any(
        isinstance(leaf, Tensor)
        or (dataclasses.is_dataclass(leaf) and leaf is not value and holds_tensors(leaf))
        for part in _parts(value)
        for leaf in pytree.tree_leaves(part)
    )


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object in its slots and its ``__dict__``."""
    values = {name: getattr(value, name) for name in slots_of(value) if hasattr(value, name)}
    return {**values, **vars(value)} if hasattr(value, "__dict__") else values


def slots_of(value: Any) -> set[str]:
    """Return the names of the attributes of an object that are in its slots."""
    kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = {name for slots in kinds for name in ((slots,) if isinstance(slots, str) else slots)}
    return names - {"__dict__", "__weakref__"}


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, type):
        return
    yield from attributes(value).values()
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value


def _is_plain_dataclass(value: Any) -> bool:
    """Return True if the fields of a dataclass are all that it holds."""
    if not dataclasses.is_dataclass(value):
        return False
    return set(getattr(value, "__dict__", ())) <= {field.name for field in dataclasses.fields(value)}


def _register(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], None]:
        return [(pytree.GetAttrKey(name), getattr(value, name)) for name in names], None

    def unflatten(values: Iterable[Any], _: None) -> Any:
        # An `__init__` may take other arguments, or check what a part does not fulfil.
        instance = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(instance, name, value)
        return instance

    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
