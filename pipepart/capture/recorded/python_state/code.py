"""Finds the names that the Python code of a forward uses, and the objects that hold them.

::

    def forward(self, x):
        return scaled(x, store.get("k"))        scaled, store, get: functions of any file, and what they name in turn
        gain = getattr(block, "gain", 1.0)      "gain": words in strings count as names
    gain = getattr(block, f"gain_{i}")      no name; what is read is noted while the model is recorded
    model.forward = partial(hooked, model)      hooked, and the forward that it wraps (accelerate)
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from ....autograd.nests import attributes
from .access import ATOMS, CLOSED, COLLECTIONS, access_to, is_filled
from .values import Holder, closure_holder, names_holder

_FEW = 16
"""Entries of the largest collection whose functions are followed; larger ones are tables of alternatives."""

_OPERATORS = {name for name in dir(int) if name.startswith("__") and name not in dir(object)}
_OPERATORS |= {
    "__call__",
    "__getitem__",
    "__getattr__",
    "__get__",
    "__contains__",
    "__iter__",
    "__next__",
    "__len__",
    "__enter__",
    "__exit__",
}
"""Methods of an object that code calls without their names."""

_NOT_FOLLOWED = frozenset(("torch", "numpy", "pipepart", *sys.stdlib_module_names))


class Code:
    """The code of a forward, with the methods and functions that it names, except those of torch and Python.

    Args:
        kinds: the classes of the model's modules, whose methods these may be.
        forwards: functions.
        held: attributes of the module that these are of.

    Attributes:
        names: all that it names: attributes, globals, and variables of closures.
        functions: the forward, and the functions and methods that it names.
        getters: the globals of the functions that call ``getattr`` or ``hasattr``.
    """

    def __init__(
        self, kinds: Sequence[type[nn.Module]], forwards: Sequence[Any], held: Mapping[str, Any]
    ) -> None:
        self.names: set[str] = set()
        self.functions: dict[FunctionType, None] = {}
        self.getters: list[dict[str, Any]] = []
        self._globals: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}  # of each file: what it names
        self._cells: list[tuple[str, CellType]] = []
        self._holders: dict[bool, list[Holder]] = {}
        self._seen: dict[int, Any] = {}  # objects and collections, kept so that no other one gets the id
        self._owners: list[Mapping[str, Any]] = [held]  # what has attributes of these names
        self._owners += [vars(base) for kind in kinds for base in kind.__mro__ if _is_users_class(base)]
        named: dict[int, Any] = {}  # classes and modules that it names, and the classes of objects
        named.update((id(base), base) for kind in kinds for base in kind.__mro__)
        waiting = [*forwards]
        while waiting:
            value = waiting.pop()
            if isinstance(value, type | ModuleType):
                named[id(value)] = value
            bases = (
                *inspect.getmro(type(value)),
                *(inspect.getmro(value) if isinstance(value, type) else ()),
            )
            named.update((id(base), base) for base in bases if _is_users_class(base))
            if type(value) is str and value.isidentifier() and value not in self.names:  # for getattr
                self.names.add(value)
                waiting += [owner[value] for owner in self._owners if value in owner]
            function, parts = _function_of(value)
            waiting += parts or self._parts_of(value)
            if function is None or function in self.functions:
                continue
            self.functions[function] = None
            written = {name for code in _codes(function.__code__) for name in _names(code)}
            self.names |= written
            if written & {"getattr", "hasattr"}:
                self.getters.append(function.__globals__)
            table, names = self._globals.setdefault(id(function.__globals__), (function.__globals__, {}))
            looked_up = written & table.keys()
            if "globals" not in written:
                looked_up &= _globals_of(function.__code__)
            names.update(dict.fromkeys(sorted(looked_up)))
            self._cells += zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            waiting += [table[name] for name in looked_up]
            waiting += [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
            waiting += [owner[name] for owner in self._owners for name in written & owner.keys()]
        self._of_classes = [
            (thing, names)
            for thing in named.values()
            if not is_of_torch(thing) and (names := [*_values(vars(thing), self.names)])
        ]

    def _parts_of(self, value: Any) -> list[Any]:
        """Return what code may call of a value that it names: entries, or methods and attributes by their names."""
        kind = type(value)
        if kind in ATOMS or id(value) in self._seen or isinstance(value, Tensor | type):
            return []
        if kind in COLLECTIONS or kind is tuple:
            self._seen[id(value)] = value
            items = [*value.values()] if isinstance(value, dict) else [*value]
            return items if len(items) <= _FEW else []
        if isinstance(value, ModuleType):
            tables = [vars(value)] if is_users(value.__name__) else []
        elif is_users(kind.__module__):
            tables = [attributes(value), *(vars(base) for base in kind.__mro__ if _is_users_class(base))]
        else:
            return []
        self._seen[id(value)] = value
        self._owners += tables
        names = self.names if isinstance(value, ModuleType) else self.names | _OPERATORS
        return [table[name] for table in tables for name in names & table.keys()]

    @cached_property
    def reads(self) -> set[str]:
        """The names that the code reads."""
        return {
            name for kind, names in self._instructions.items() if kind.startswith("LOAD") for name in names
        }

    def stores(self, owner: Any) -> set[str]:
        """Return the names that the code sets in a globals dict, a cell of a closure, a class or a module.

        Of a class only if it names the class or asks an object for it.
        """
        if isinstance(owner, type) and not self.names & {owner.__name__, "type", "__class__"}:
            return set()
        is_cell = isinstance(owner, CellType)
        kind = "STORE_GLOBAL" if isinstance(owner, dict) else "STORE_DEREF" if is_cell else "STORE_ATTR"
        return self._instructions.get(kind, set())

    @cached_property
    def _instructions(self) -> dict[str, set[str]]:
        """Map each kind of instruction in the code to its names."""
        names: dict[str, set[str]] = {}
        for kind, name in (
            pair for function in self.functions for pair in _named_instructions(function.__code__)
        ):
            names.setdefault(kind, set()).add(name)
        return names

    def holders(self, recorded: bool) -> list[Holder]:
        """Return the holders of the globals, class attributes and closure variables that the code uses.

        Args:
            recorded: whether calls of this code are recorded.
        """
        if recorded not in self._holders:
            self._holders[recorded] = [*self._iterate_holders(recorded)]
        return self._holders[recorded]

    def _iterate_holders(self, recorded: bool) -> Iterator[Holder]:
        for table, names in self._globals.values():
            yield names_holder(str(table.get("__name__", "")).rpartition(".")[2], table, names, recorded)
        for kind, names in self._of_classes:
            yield names_holder(kind.__name__, kind, names, recorded)
        for name, cell in self._cells:
            yield closure_holder(name, cell, recorded)
        for function in self.functions:
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            if any(type(value) not in ATOMS for value in defaults) and (access := access_to(function)):
                yield Holder(function.__name__, None, function, access, recorded=recorded)


def _values(table: Mapping[str, Any], names: set[str]) -> Iterator[str]:
    """Return those of the names that a class or module binds to values."""
    for name in sorted(names & table.keys()):
        if not isinstance(table[name], (*CLOSED, type, property, staticmethod, classmethod, FunctionType)):
            yield name


def _function_of(value: Any) -> tuple[FunctionType | None, list[Any]]:
    """Return the user's Python function in a method, property or callable object, and other callables in it."""
    if isinstance(value, partial):
        return None, [value.func, *value.args, *value.keywords.values(), getattr(value, "__wrapped__", None)]
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        return (value if is_users(value.__module__) else None), [getattr(value, "__wrapped__", None)]
    called = (
        None if isinstance(value, type | nn.Module) else inspect.getattr_static(type(value), "__call__", None)
    )
    if isinstance(called, FunctionType) and is_users(called.__module__):
        return called, [*vars(value).values()] if hasattr(value, "__dict__") else []
    return None, []


def is_users(module: str | None) -> bool:
    """Return True for the name of a Python module that is not part of torch, numpy, this package or Python."""
    return (module or "builtins").partition(".")[0] not in _NOT_FOLLOWED


def _names(code: CodeType) -> Iterator[str]:
    """Return the names in a piece of code, and the words in its strings, which ``getattr`` may be given.

    Names that are no identifiers are those of tools that rewrite code, such as pytest.
    """
    yield from filter(str.isidentifier, code.co_names)
    yield from code.co_freevars
    yield from (
        constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()
    )


@cache
def _named_instructions(code: CodeType) -> frozenset[tuple[str, str]]:
    """Return the kind and the name of each instruction that has a name."""
    instructions = (instruction for inner in _codes(code) for instruction in dis.get_instructions(inner))
    return frozenset(
        (instruction.opname, instruction.argval)
        for instruction in instructions
        if isinstance(instruction.argval, str)
    )


def _globals_of(code: CodeType) -> set[str]:
    """Return the names that code looks up as globals; attributes may have the names of other globals."""
    return {name for kind, name in _named_instructions(code) if kind.endswith(("_GLOBAL", "_NAME"))}


def _is_users_class(kind: type) -> bool:
    return is_users(kind.__module__)


def is_of_torch(value: Any) -> bool:
    """Return True for a class or module that is part of torch or Python."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return f"{name}.".startswith(("torch.", "builtins."))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
