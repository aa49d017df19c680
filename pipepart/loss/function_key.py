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
from torch.nn.modules.module import _has_any_global_hook

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
    [
        "eval",
        "exec",
        "globals",
        "locals",
        "vars",
        "getattr",
        "open",
        "input",
        "id",
        "attrgetter",
        "methodcaller",
        "__import__",
        "__dict__",
        "__getattribute__",
        "__class__",
    ]
)  # names by which code finds values that it does not name
_SETTINGS = frozenset(
    [
        "get_default_dtype",
        "get_default_device",
        "is_grad_enabled",
        "is_inference_mode_enabled",
        "is_autocast_enabled",
        "is_autocast_cpu_enabled",
        "get_autocast_dtype",
        "get_autocast_gpu_dtype",
        "get_autocast_cpu_dtype",
        "initial_seed",
        "are_deterministic_algorithms_enabled",
        "is_deterministic_algorithms_warn_only_enabled",
        "get_num_threads",
        "get_float32_matmul_precision",
        "get_rng_state",
        "default_generator",
        "random",
        "backends",
        "distributed",
        "cuda",
        "accelerator",
    ]
)  # names in torch whose values follow its settings
_HIDDEN = (torch.Generator, torch.jit.ScriptFunction, operator.attrgetter, operator.methodcaller)
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
    if _has_any_global_hook():  # which may change what any module computes
        return None
    reader = _Reader()
    try:
        reader.read(function)
        reader.read_modules()
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
        self._names: set[str] = set()  # that code uses
        self._modules: dict[int, tuple[ModuleType, set[str]]] = {}  # with the names that were read

    def read(self, value: Any) -> None:
        """Read one value; of modules of Python nothing yet."""
        if type(value) in _PLAIN:
            self.tokens.append((type(value), value or str(value)))  # 0.0 equals -0.0
        elif (place := self._places.get(id(value))) is not None:
            self.tokens.append(place)
        else:
            self._hold(value)
            self._read(value)

    def read_modules(self) -> None:
        """Read what any of the code may read from the modules of Python that it is given or names."""
        pending = True
        while pending:
            pending = False
            for module, names in [*self._modules.values()]:
                for name in sorted(self._names - names):
                    names.add(name)
                    if name in vars(module):
                        self.tokens.append(name)
                        self.read(vars(module)[name])
                        pending = True

    def _read(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, Tensor) and value.is_leaf:
            self.tokens.append((id(value), version(value), value.requires_grad))
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, ModuleType):
            self.tokens.append(id(value))
            self._modules.setdefault(id(value), (value, set()))
        elif isinstance(value, MethodType):
            self._several((value.__func__, value.__self__))
        elif isinstance(value, partial):
            self._several((value.func, value.args, value.keywords))
        elif kind in _CONTAINERS:
            contents = tuple(_CONTAINERS[kind](value))
            self.tokens.append((kind, len(contents)))
            self._several(contents)
        elif _has_attributes_only(kind):
            self._object(value)
        elif _is_trusted(value) and not isinstance(value, _HIDDEN):
            self.tokens.append(id(value))
        else:
            raise _UnknownError

    def _hold(self, value: Any) -> None:
        """Note a value that is read, so that it is not read again and keeps its identity."""
        if len(self.held) >= _MOST:
            raise _UnknownError
        self._places[id(value)] = len(self.held)
        self.held.append(value)

    def _several(self, values: Iterable[Any]) -> None:
        for value in values:
            self.read(value)

    def _function(self, function: FunctionType) -> None:
        """Read a function's code, defaults, closure, attributes, and the global variables that it names."""
        trusted = _package(function.__globals__.get("__name__")) in _TRUSTED  # __module__ may be another's
        names = frozenset() if trusted else _names(function.__code__)
        if names is None:
            raise _UnknownError
        self._names |= names
        self.held.append(function.__code__)
        self.tokens.append(id(function.__code__))
        self.read(function.__defaults__)
        self.read(function.__kwdefaults__)
        if function.__dict__:
            self.read(function.__dict__)
        for cell in function.__closure__ or ():
            try:
                self.read(cell.cell_contents)
            except ValueError as error:  # it is empty
                raise _UnknownError from error
        for name in names:
            if name in function.__globals__:
                self.tokens.append(name)
                self.read(function.__globals__[name])

    def _object(self, value: Any) -> None:
        """Read the attributes of an object and the functions of its class."""
        self.tokens.append(type(value))
        for name, attribute in vars(value).items():
            if type(attribute) not in _CONTAINERS or attribute:  # as most of a module's are empty
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
                    elif name not in ("__dict__", "__weakref__", "__doc__", "__module__", "__slots__"):
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
    return None if names & (_INDIRECT | _SETTINGS) else frozenset(names)


@cache
def _has_attributes_only(kind: type) -> bool:
    """Return True if all that an object of this kind holds is in its ``__dict__`` and in its classes."""
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return (
        type(kind) is type
        and not slots
        and kind.__dictoffset__ != 0
        and kind.__basicsize__ <= _Class.__basicsize__
    )


def _is_trusted(value: Any) -> bool:
    """Return True for functions in C and classes of packages that keep no state between calls."""
    return isinstance(value, Callable) and _package_of(value) in _TRUSTED


def _package_of(value: Any) -> str:
    module = getattr(value, "__module__", None)
    if module is None:  # a method of C
        owner = getattr(value, "__self__", None)
        module = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", "")
    return _package(module)


def _package(module: Any) -> str:
    return str(module).partition(".")[0]
