"""Computes a key of everything that a loss function reads besides its arguments: code, constants, tensors.

A loss with the same key computes alike in each call. Functions that read anything whose state cannot be seen, such as
an iterator, a random generator or a clock, have no key.
"""

from __future__ import annotations

import dis
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.in_place import version

_TRUSTED = frozenset(
    {"torch", "pipepart", "math", "operator", "_operator", "builtins"}
)  # packages without state
_PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, range})
_CONTAINERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys((list, tuple), iter),
    **{kind: partial(sorted, key=repr) for kind in (set, frozenset)},
    **{kind: operator.methodcaller("items") for kind in (dict, OrderedDict)},
}
_INDIRECT = frozenset(
    {"eval", "exec", "globals", "locals", "vars", "getattr", "open", "input", "id", "__import__"}
)
_MOST = 500  # values that a function may read


class FunctionKey(NamedTuple):
    """Collects the values that a function reads, as a key.

    Attributes:
        tokens: equal if the function computes alike.
        held: the objects that ``tokens`` names by their identity.
    """

    tokens: tuple[Hashable, ...]
    held: tuple[Any, ...]


def function_key(function: Callable[..., Any] | None) -> FunctionKey | None:
    """Return the key of a function, bound method or module; None if it may read values that cannot be found."""
    reader = _Reader()
    try:
        reader.read(function)
    except (_UnknownError, RecursionError):
        return None
    return FunctionKey(tuple(reader.tokens), tuple(reader.held))


class _UnknownError(Exception):
    """A value whose state cannot be seen."""


class _Class:
    """A class without attributes in C: an instance of the same size has none either."""


class _Reader:
    """Reads values in depth."""

    def __init__(self) -> None:
        self.tokens: list[Hashable] = []
        self.held: list[Any] = []
        self._places: dict[int, int] = {}

    def read(self, value: Any, names: Iterable[str] = ()) -> None:
        """Add one value to the key. ``names``: the names that the surrounding code uses."""
        if type(value) in _PLAIN:
            self.tokens.append((type(value), value))
        elif (place := self._places.get(id(value))) is not None:
            self.tokens.append(place)
        else:
            self._hold(value)
            self._read(value, names)

    def _read(self, value: Any, names: Iterable[str]) -> None:
        kind = type(value)
        if isinstance(value, Tensor) and value.is_leaf:
            self.tokens.append((id(value), version(value), value.requires_grad))
        elif isinstance(value, FunctionType) and not _is_trusted(value):
            self._function(value)
        elif isinstance(value, ModuleType) and not _is_trusted(value):
            self._several(vars(value)[name] for name in names if name in vars(value))
        elif isinstance(value, MethodType):
            self._several((value.__func__, value.__self__))
        elif isinstance(value, partial):
            self._several((value.func, value.args, value.keywords))
        elif kind in _CONTAINERS:
            contents = tuple(_CONTAINERS[kind](value))
            self.tokens.append((kind, len(contents)))
            self._several(contents)
        elif kind.__basicsize__ <= _Class.__basicsize__ and hasattr(value, "__dict__"):
            self._object(value)
        elif _is_trusted(value) and not isinstance(value, torch.Generator | torch.jit.ScriptFunction):
            self.tokens.append(id(value))
        else:
            raise _UnknownError

    def _hold(self, value: Any) -> None:
        """Note a value that is read, so that it is not read again and keeps its identity."""
        if len(self.held) == _MOST:
            raise _UnknownError
        self._places[id(value)] = len(self.held)
        self.held.append(value)

    def _several(self, values: Iterable[Any]) -> None:
        for value in values:
            self.read(value)

    def _function(self, function: FunctionType) -> None:
        """Read a function's code, defaults, closure, and the global variables that it names."""
        names = _names(function.__code__)
        if names is None:
            raise _UnknownError
        self.tokens.append(id(function.__code__))
        self.read(function.__defaults__)
        self.read(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.read(cell.cell_contents, names)
            except ValueError as error:  # it is empty
                raise _UnknownError from error
        for name in names:
            if name in function.__globals__:
                self.read(function.__globals__[name], names)

    def _object(self, value: Any) -> None:
        """Read the attributes of an object and the functions of its class."""
        self.tokens.append(type(value))
        for name, attribute in vars(value).items():
            if not isinstance(attribute, dict | set) or attribute:  # as most of a module's are empty
                self.tokens.append(name)
                self.read(attribute)
        for kind in type(value).__mro__:
            if not _is_trusted(kind) and id(kind) not in self._places:
                self._hold(kind)
                for name, attribute in vars(kind).items():
                    if isinstance(attribute, staticmethod | classmethod):
                        self.read(attribute.__func__)
                    elif isinstance(attribute, property):
                        self.read(attribute.fget)
                    elif name not in ("__dict__", "__weakref__", "__doc__", "__module__"):
                        self.read(attribute)


@cache
def _names(code: CodeType) -> frozenset[str] | None:
    """Return the names that code uses, with the functions inside it; None if it imports or finds values by name."""
    if any(step.opname in ("IMPORT_NAME", "STORE_GLOBAL") for step in dis.get_instructions(code)):
        return None
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _names(constant)
            if inner is None:
                return None
            names |= inner
    return None if names & _INDIRECT else frozenset(names)


def _is_trusted(value: Any) -> bool:
    """Return True for functions, classes and modules of packages that keep no state between calls."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _TRUSTED
    return isinstance(value, Callable) and _package_of(value) in _TRUSTED


def _package_of(value: Any) -> str:
    module = getattr(value, "__module__", None)
    if module is None:  # a method of C
        owner = getattr(value, "__self__", None)
        module = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", "")
    return str(module).partition(".")[0]
