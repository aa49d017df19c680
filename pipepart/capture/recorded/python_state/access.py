"""Reads and restores the contents of Python objects: modules, collections, generators and other objects."""

from __future__ import annotations

import logging
import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._contextlib import _DecoratorContextManager

from ....autograd.in_place import version
from ....autograd.nests import attributes, slots_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, np.generic)
"""Values that nothing changes."""

CLOSED = (nn.Module, nn.Parameter, ModuleType, BuiltinFunctionType, logging.Logger, _DecoratorContextManager)
"""Objects that are not looked into."""

COLLECTIONS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
"""Collections of Python itself; subclasses may do anything when they are used."""

ITEMS = 4096
"""The size of the largest collection, array or tensor that is looked into."""

CONSTANT = (tuple, frozenset, MethodType)
"""Objects that are looked into, and always hold the same objects."""

UNCHANGED = (*CONSTANT, partial, FunctionType, ref)
"""Objects that are looked into, and that only what they hold can change."""

TABLES = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl", "dynamo_ctx"}
"""Attributes of a module that are torch's own; the last two hold compiled code."""

STATE = "<state>"
"""The key of the state of a generator of random numbers."""

_VALUES = "<values>"
_COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor")

Contents = dict[Any, Any]
_METHODS = frozenset((FunctionType, property, staticmethod, classmethod))
ATOMS = frozenset(kind for kind in PLAIN if kind not in (Enum, np.generic))
MISSING = object()


class Access(NamedTuple):
    """Functions that read and restore the contents of a kind of object.

    ``parts`` returns objects quickly that are the same ones only as long as the contents are; None for the contents.
    """

    read: Callable[[Any], Contents]
    write: Callable[[Any, Contents], None]
    parts: Callable[[Any], Iterable[Any]] | None = None


class Exactly:
    """A state that is compared byte by byte."""

    def __init__(self, value: Any) -> None:
        self.value = value
        held = value.numpy() if isinstance(value, Tensor) else value
        self.key = held.tobytes() if isinstance(held, np.ndarray | array) else repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exactly) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def access_to(value: Any) -> Access | None:
    """Return the access to an object's contents; None if they are not inspected, too large or always empty."""
    kind = type(value)
    if kind in ATOMS or issubclass(kind, (*PLAIN, *CLOSED, Exactly)):
        return None
    if kind.__module__.startswith(_COMPILER):
        return None  # changes with every call
    if issubclass(kind, dict | list | set | deque):
        return _COLLECTION if len(value) <= ITEMS else _LARGE
    if issubclass(kind, type):
        return _CLASS if value.__module__ not in ("builtins", "torch") else None
    if issubclass(kind, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        holds = value.__closure__ or any(type(default) not in ATOMS for default in defaults)
        return _FUNCTION if holds and not (value.__module__ or "").startswith(_COMPILER) else None
    for kinds, access in _KNOWN:
        if issubclass(kind, kinds):
            return access(value) if isinstance(access, FunctionType) else access
    return _OBJECT if hasattr(value, "__dict__") or attributes(value) else None


def is_filled(cell: CellType) -> bool:
    """Return True if the cell of a closure variable has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def leave(owner: Any, was: Contents) -> None:
    """Restore nothing, for objects that never change or that ``bindings_restored`` restores."""


def _of_module(module: nn.Module) -> Contents:
    values = {name: value for name, value in vars(module).items() if name not in TABLES}
    return {**values, **module._parameters, **module._buffers, **module._modules}


def _of_collection(value: Any) -> Contents:
    if isinstance(value, dict):
        return dict(dict.items(value))  # a subclass may have an items() of its own
    return dict.fromkeys(value) if isinstance(value, set) else dict(enumerate(value))


def _fill(value: Any, was: Contents) -> None:
    value.clear()
    if isinstance(value, dict | set):
        value.update(was)
    else:
        value.extend(was.values())


def _of_function(value: FunctionType) -> Contents:
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    contents: Contents = {name: cell.cell_contents for name, cell in cells if is_filled(cell)}
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return {**contents, **dict(enumerate(defaults))}


def _fill_cells(value: FunctionType, was: Contents) -> None:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        if name in was and (not is_filled(cell) or cell.cell_contents is not was[name]):
            cell.cell_contents = was[name]


def _of_class(kind: type) -> Contents:
    return {
        name: item
        for name, item in vars(kind).items()
        if type(item) in ATOMS or (type(item) not in _METHODS and isinstance(item, PLAIN))
    }


def _fill_object(value: Any, was: Contents) -> None:
    slots = slots_of(value)
    rebind(getattr(value, "__dict__", {}), {**was, **attributes(value)}.keys() - slots, was)
    for name in slots:
        if name in was:
            object.__setattr__(value, name, was[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _of_tensor(value: Tensor) -> Access | None:
    return None if value.is_meta else _TENSOR


def _of_array(value: Any) -> Access | None:
    return _ARRAY if value.size <= ITEMS and not value.dtype.hasobject else None


def _of_python_generator(value: random.Random) -> Access | None:
    return None if isinstance(value, random.SystemRandom) else _PYTHON_GENERATOR


MODULE = Access(_of_module, leave)
_COLLECTION = Access(_of_collection, _fill)
_LARGE = Access(lambda value: {"length": len(value)}, leave)
_FUNCTION = Access(_of_function, _fill_cells)
_CLASS = Access(
    _of_class,
    lambda kind, was: rebind(kind, {**_of_class(kind), **was}, was),
    lambda kind: (*vars(kind), *vars(kind).values()),
)
_OBJECT = Access(attributes, _fill_object)
_TENSOR = Access(lambda tensor: {_VALUES: version(tensor)}, leave)
_ARRAY = Access(
    lambda held: {_VALUES: Exactly(held.copy())}, lambda held, was: np.copyto(held, was[_VALUES].value)
)
_PYTHON_GENERATOR = Access(
    lambda drawn: {STATE: drawn.getstate()}, lambda drawn, was: drawn.setstate(was[STATE])
)
_KNOWN: tuple[tuple[Any, Any], ...] = (
    (Tensor, _of_tensor),
    (tuple | frozenset, Access(lambda held: dict(enumerate(held)), leave)),
    (MethodType, Access(lambda held: {"__self__": held.__self__, "__func__": held.__func__}, leave)),
    (partial, Access(lambda held: {"func": held.func, "args": held.args, "keywords": held.keywords}, leave)),
    (ref, Access(lambda held: {"": held()}, leave)),
    (ContextVar, Access(lambda held: {"": held.get(None)}, lambda held, was: held.set(was[""]) and None)),
    (array, Access(lambda held: {_VALUES: Exactly(held[:])}, lambda held, was: _fill_array(held, was))),
    (np.ndarray, _of_array),
    (random.Random, _of_python_generator),
    (
        torch.Generator | np.random.RandomState,
        Access(
            lambda drawn: {STATE: Exactly(drawn.get_state())},
            lambda drawn, was: drawn.set_state(was[STATE].value),
        ),
    ),
    (
        np.random.Generator,
        Access(
            lambda drawn: {STATE: Exactly(drawn.bit_generator.state)},
            lambda drawn, was: setattr(drawn.bit_generator, "state", was[STATE].value),
        ),
    ),
)


def _fill_array(held: array[Any], was: Contents) -> None:
    held[:] = was[_VALUES].value


def bindings(owner: Any) -> Mapping[Any, Any]:
    """Return what a class or a Python module binds to names, or a mapping itself."""
    return vars(owner) if isinstance(owner, type | ModuleType) else owner


def rebind(owner: Any, names: Iterable[Any], was: Mapping[Any, Any]) -> None:
    """Restore some names of a mapping, a class or a Python module.

    Only names that are bound to something else are written: some modules cannot be written to.
    """
    held = bindings(owner)
    is_mapping = held is owner
    for name in names:
        if name not in was:
            if name in held:
                owner.__delitem__(name) if is_mapping else delattr(owner, name)
        elif name not in held or held[name] is not was[name]:
            owner.__setitem__(name, was[name]) if is_mapping else setattr(owner, name, was[name])
