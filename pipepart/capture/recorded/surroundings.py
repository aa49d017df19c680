"""What the Python code between recorded calls can read: if any of it changes, a model is recorded again.

::

    def forward(self, x):
        for block in self.blocks:               the modules of the model, in their order
            x = block(x) * block.gain           attributes of whole modules that this code names
            x = self.act(x) * self.scales[0]    attributes of open modules, and what is in them
            x = x * SCALE + offset              globals and closures that this code names
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_CLOSED = (Tensor, nn.Module, ModuleType, BuiltinFunctionType, type, logging.Logger)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = frozenset(("_parameters", "_buffers", "_modules", *_HOOKS))
_DEPTH = 5  # of what is looked at in an attribute
_ITEMS = 4096  # larger collections count by their length


class Same:
    """An object that equals itself only, and is kept, so that its id is not given to another."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def state_of(value: Any, depth: int = _DEPTH, seen: set[int] | None = None) -> Hashable:
    """Return a key of a value and of what it holds; tensors, modules and functions count as themselves."""
    if isinstance(value, _PLAIN):
        return type(value), value
    seen = set() if seen is None else seen
    if isinstance(value, type):
        return Same(value), tuple([item for item in vars(value).values() if isinstance(item, _PLAIN)])
    if isinstance(value, _CLOSED) or not depth or id(value) in seen:
        return Same(value)
    seen.add(id(value))
    if isinstance(value, dict | list | tuple | set | frozenset):
        if len(value) > _ITEMS:
            return Same(value), len(value)
        if isinstance(value, dict):
            found = [
                (state_of(key, depth - 1, seen), state_of(item, depth - 1, seen))
                for key, item in value.items()
            ]
            return type(value), tuple(found)
        return type(value), tuple([state_of(item, depth - 1, seen) for item in value])
    if isinstance(value, np.ndarray):
        return Same(value), value.tobytes() if value.size <= _ITEMS and not value.dtype.hasobject else ()
    found = [(name, state_of(item, depth - 1, seen)) for name, item in _held_by(value)]
    return Same(getattr(value, "__func__", value)), tuple(found)


def _held_by(value: Any) -> list[tuple[str, Any]]:
    """Return what an object, a method, a partial function or the closure of a function holds."""
    if isinstance(value, FunctionType):
        return [("", cell.cell_contents) for cell in value.__closure__ or () if _is_filled(cell)]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    if isinstance(value, partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    found = [(name, getattr(value, name)) for name in slots if name != "__dict__" and hasattr(value, name)]
    return [*found, *vars(value).items()] if hasattr(value, "__dict__") else found


class Surroundings:
    """Looks at what the forwards of a model's open modules can read. Their code is looked through once.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._codes: dict[Any, _Code] = {}

    def state(self, opened: Sequence[nn.Module]) -> Hashable:
        """Return a key that changes with it."""
        names: set[str] = set()
        seen: set[int] = set()
        found: list[Hashable] = []
        codes: dict[_Code, None] = {}
        for module in opened:
            code = self._code_of(module)
            codes[code] = None
            names |= code.names
            found.append(_state_of_open(module, code.names, seen))
        found += [code.state(seen) for code in codes]
        is_open = set(opened)
        for module in self._model.modules():
            attributes = vars(module)
            if module not in is_open and (read := names.intersection(attributes) - _TABLES):
                values = [(name, attributes[name]) for name in sorted(read)]
                plain = [(name, value) for name, value in values if not isinstance(value, _CLOSED)]
                found.append(tuple([(name, state_of(value, _DEPTH, seen)) for name, value in plain]))
        if "requires_grad" in names:
            found.append(tuple([parameter.requires_grad for parameter in self._model.parameters()]))
        return tuple(found)

    def _code_of(self, module: nn.Module) -> _Code:
        forward = module.forward
        function = getattr(forward, "__func__", forward)
        key = type(module), function
        if key not in self._codes:
            kinds = dict.fromkeys(type(one) for one in self._model.modules() if not _is_of_torch(type(one)))
            self._codes[key] = _Code([type(module), *kinds], function)
        return self._codes[key]


def _state_of_open(module: nn.Module, names: set[str], seen: set[int]) -> Hashable:
    attributes = vars(module)
    kind = type(module)
    return (
        Same(kind),
        Same(getattr(module.forward, "__func__", module.forward)),
        tuple([(name, Same(child)) for name, child in module._modules.items()]),
        tuple([(name, value is None) for name, value in module._parameters.items()]),
        tuple([(name, value is None) for name, value in module._buffers.items()]),
        tuple([Same(hook) for table in _HOOKS for hook in attributes[table].values()]),
        tuple(
            [
                (name, state_of(value, _DEPTH, seen))
                for name, value in attributes.items()
                if name not in _TABLES and (name in names or name == "config" or isinstance(value, _PLAIN))
            ]
        ),
    )


class _Code:
    """The code of a forward, with the methods and the functions of its file that it names.

    Args:
        kinds: the classes of the model's modules, whose methods these may be.
        forward: a function.

    Attributes:
        names: all that it names: attributes, globals, and variables of closures.
    """

    def __init__(self, kinds: Sequence[type[nn.Module]], forward: Any) -> None:
        self.names: set[str] = set()
        self._globals: list[tuple[dict[str, Any], list[str]]] = []
        self._cells: list[CellType] = []
        named: dict[int, Any] = {}  # classes and modules that it names
        seen: set[Any] = set()
        waiting = [forward]
        while waiting:
            function = _function_of(waiting.pop())
            if function is None or function in seen:
                continue
            seen.add(function)
            own = {name for code in _codes(function.__code__) for name in (*code.co_names, *code.co_freevars)}
            self.names |= own
            self._globals.append((function.__globals__, sorted(own & function.__globals__.keys())))
            self._cells += function.__closure__ or ()
            near = [function.__globals__[name] for name in own & function.__globals__.keys()]
            named.update((id(one), one) for one in near if isinstance(one, type | ModuleType))
            waiting += [one for one in near if getattr(one, "__module__", "") == function.__module__]
            waiting += [inspect.getattr_static(kind, name, None) for kind in kinds for name in own]
            waiting += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        bases = [base for kind in kinds for base in kind.__mro__]
        named.update((id(one), one) for one in bases)
        self._of_classes = [
            (vars(one), name)
            for one in named.values()
            if not _is_of_torch(one)
            for name in sorted(self.names & vars(one).keys())
            if not isinstance(vars(one)[name], (*_CLOSED, property, staticmethod, classmethod, FunctionType))
        ]

    def state(self, seen: set[int]) -> Hashable:
        """Return a key of the attributes of classes and modules, of the globals and of the variables of closures."""
        return (
            tuple([state_of(place.get(name), _DEPTH, seen) for place, name in self._of_classes]),
            tuple(
                [state_of(place.get(name), _DEPTH, seen) for place, names in self._globals for name in names]
            ),
            tuple([state_of(cell.cell_contents, _DEPTH, seen) for cell in self._cells if _is_filled(cell)]),
        )


def _function_of(value: Any) -> FunctionType | None:
    """Return the Python function in a method or property; None for anything else and for torch's own."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) and not value.__module__.startswith("torch.") else None


def _is_of_torch(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return f"{name}.".startswith(("torch.", "builtins."))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
