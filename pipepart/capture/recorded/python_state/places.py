"""Places where a model holds Python values: modules, objects, collections, generators, globals and closures."""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ....autograd.in_place import version

PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
"""Values that nothing changes."""

CLOSED = (Tensor, nn.Module, ModuleType, BuiltinFunctionType, type, logging.Logger)
"""Objects that are not looked into."""

DEPTH = 5
"""How deep objects are looked into."""

ITEMS = 4096
"""The size of the largest collection that is looked into."""

TABLES = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl", "dynamo_ctx"}
"""Attributes of a module that are torch's own; the last two hold compiled code."""

STATE = "<state>"
"""The key of the state of a generator of random numbers."""

VALUES = "<values>"
"""The key of the values of an array or tensor."""

Contents = dict[Any, Any]
COLLECTIONS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
"""Collections that are looked into; others may do anything when they are read."""

_Access = tuple[Callable[[], Contents], Callable[[Contents], None]]


@dataclass(eq=False)
class Place:
    """One thing that holds values: a module, an object, a list, the globals of a file.

    Attributes:
        label: how to get there from the model, as in ``"blocks.0.seen"``.
        owner: what holds the values.
        root: the module where the way begins; None for globals, classes and closures.
        read: returns what is in it.
        write: puts that back.
        recorded: whether code that is recorded uses it.
        is_module: whether these are the attributes of the root.
    """

    label: str
    owner: Any
    root: nn.Module | None
    read: Callable[[], Contents]
    write: Callable[[Contents], None]
    recorded: bool = True
    is_module: bool = False


def held_by(value: Any) -> list[tuple[str, Any]]:
    """Return what an object, a method, a partial function, or the closure and defaults of a function hold, by names."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        found = [(f".{name}", cell.cell_contents) for name, cell in cells if is_filled(cell)]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return found + [("", default) for default in defaults]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    if isinstance(value, partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if isinstance(value, tuple):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    return [(f".{name}", item) for name, item in _attributes(value).items()]


def is_filled(cell: CellType) -> bool:
    """Return True if the variable of a closure has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def module_place(path: str, module: nn.Module) -> Place:
    """Return the place of a module's attributes, parameters, buffers and modules."""

    def read() -> Contents:
        own = {name: value for name, value in vars(module).items() if name not in TABLES}
        return {**own, **module._parameters, **module._buffers, **module._modules}

    def write(was: Contents) -> None:
        """Leave it: ``bindings_restored`` writes it back."""

    return Place(path, module, module, read, write, is_module=True)


def names_place(label: str, table: dict[str, Any], names: Iterable[str], recorded: bool) -> Place:
    """Return the place of some of the globals of a file."""
    names = tuple(names)

    def write(was: Contents) -> None:
        _rebind(table, names, was)

    return Place(
        label, table, None, lambda: {name: table[name] for name in names if name in table}, write, recorded
    )


def class_place(kind: type | ModuleType, names: Iterable[str], recorded: bool) -> Place:
    """Return the place of some of the attributes of a class or a module of Python."""
    names = tuple(names)
    held = vars(kind)

    def write(was: Contents) -> None:
        for name in names:
            if name in was and held.get(name) is not was[name]:
                setattr(kind, name, was[name])
            elif name in held and name not in was:
                delattr(kind, name)

    return Place(
        kind.__name__,
        kind,
        None,
        lambda: {name: held[name] for name in names if name in held},
        write,
        recorded,
    )


def closure_place(name: str, cell: CellType, recorded: bool) -> Place:
    """Return the place of one variable of a closure."""

    def write(was: Contents) -> None:
        if was:
            cell.cell_contents = was[name]

    return Place(
        "", cell, None, lambda: {name: cell.cell_contents} if is_filled(cell) else {}, write, recorded
    )


def place_of(label: str, value: Any) -> Place | None:
    """Return the place of what an object holds; None if it is not looked into, is too large or holds nothing."""
    if isinstance(value, CLOSED) and not isinstance(value, Tensor):
        return None
    for access in (_of_state, _of_values, _of_collection, _of_object):
        if (found := access(value)) is not None:
            return Place(label, value, None, *found)
    return None


def _of_state(value: Any) -> _Access | None:
    """Read and write the state of a generator of random numbers."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return lambda: {STATE: value.getstate()}, lambda was: value.setstate(was[STATE])
    if isinstance(value, torch.Generator | np.random.RandomState):
        return lambda: {STATE: Exactly(value.get_state())}, partial(_set_state, value)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: {STATE: Exactly(bits.state)}, lambda was: setattr(bits, "state", was[STATE].value)
    return None


def _of_values(value: Any) -> _Access | None:
    """Read and write the values of an array, or of a tensor that is neither parameter nor buffer, if it is small."""
    if isinstance(value, np.ndarray) and value.size <= ITEMS and not value.dtype.hasobject:
        return lambda: {VALUES: Exactly(value.copy())}, lambda was: np.copyto(value, was[VALUES].value)
    if not isinstance(value, Tensor) or value.is_meta:
        return None
    kept = value.detach().clone() if value.numel() <= ITEMS else None

    def write(was: Contents) -> None:
        if kept is not None:
            with torch.no_grad():
                value.copy_(kept)

    return lambda: {VALUES: version(value)}, write


def _of_collection(value: Any) -> _Access | None:
    if type(value) not in COLLECTIONS or len(value) > ITEMS:
        return None

    def write(was: Contents) -> None:
        value.clear()
        if isinstance(value, dict | set):
            value.update(was)
        else:
            value.extend(was.values())

    kind = dict if isinstance(value, dict) else dict.fromkeys if isinstance(value, set) else _numbered
    return lambda: kind(value), write


def _of_object(value: Any) -> _Access | None:
    if isinstance(value, np.ndarray | Tensor | dict | list | set | deque) or not _attributes(value):
        return None

    def write(was: Contents) -> None:
        slots = _slots(value)
        _rebind(getattr(value, "__dict__", {}), {**was, **_attributes(value)}.keys() - slots, was)
        for name in slots:
            if name in was:
                object.__setattr__(value, name, was[name])
            elif hasattr(value, name):
                object.__delattr__(value, name)

    return lambda: _attributes(value), write


def _set_state(generator: Any, was: Contents) -> None:
    generator.set_state(was[STATE].value)


def _numbered(value: Iterable[Any]) -> Contents:
    return dict(enumerate(value))


class Exactly:
    """A state that is compared by its bytes."""

    def __init__(self, value: Any) -> None:
        self.value = value
        array = value.numpy() if isinstance(value, Tensor) else value
        self.key = array.tobytes() if isinstance(array, np.ndarray) else repr(value)


def _attributes(value: Any) -> dict[str, Any]:
    found = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return {**found, **vars(value)} if hasattr(value, "__dict__") else found


def _slots(value: Any) -> set[str]:
    kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = {name for slots in kinds for name in ((slots,) if isinstance(slots, str) else slots)}
    return names - {"__dict__", "__weakref__"}


def _rebind(table: dict[str, Any], names: Iterable[str], was: Contents) -> None:
    for name in names:
        if name in was:
            table[name] = was[name]
        else:
            table.pop(name, None)
