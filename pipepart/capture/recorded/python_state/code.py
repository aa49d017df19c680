"""The Python code of a forward: what it names, and where these names live."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from .places import CLOSED, Place, class_place, closure_place, is_filled, names_place


class Code:
    """The code of a forward, with the methods and the functions of its file that it names.

    Args:
        kinds: the classes of the model's modules, whose methods these may be.
        forward: a function.

    Attributes:
        names: all that it names: attributes, globals, and variables of closures.
        functions: the forward, and the functions of its file and the methods that it names.
    """

    def __init__(self, kinds: Sequence[type[nn.Module]], forward: Any) -> None:
        self.names: set[str] = set()
        self._globals: list[tuple[dict[str, Any], list[str]]] = []
        self._cells: list[tuple[str, CellType]] = []
        self._places: dict[bool, list[Place]] = {}
        named: dict[int, Any] = {}  # classes and modules that it names
        self.functions: dict[FunctionType, None] = {}
        waiting = [forward]
        while waiting:
            function = _function_of(waiting.pop())
            if function is None or function in self.functions:
                continue
            self.functions[function] = None
            own = {name for code in _codes(function.__code__) for name in (*code.co_names, *code.co_freevars)}
            self.names |= own
            self._globals.append((function.__globals__, sorted(own & function.__globals__.keys())))
            self._cells += zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            near = [function.__globals__[name] for name in own & function.__globals__.keys()]
            named.update((id(one), one) for one in near if isinstance(one, type | ModuleType))
            waiting += [one for one in near if getattr(one, "__module__", "") == function.__module__]
            waiting += [inspect.getattr_static(kind, name, None) for kind in kinds for name in own]
            waiting += [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
        bases = [base for kind in kinds for base in kind.__mro__]
        named.update((id(one), one) for one in bases)
        self._of_classes = [
            (one, names)
            for one in named.values()
            if not is_of_torch(one) and (names := [*_values(vars(one), self.names)])
        ]

    def places(self, recorded: bool) -> list[Place]:
        """Return the globals, attributes of classes, and variables of closures that it uses.

        Args:
            recorded: whether calls of this code are recorded.
        """
        if recorded not in self._places:
            self._places[recorded] = [*self._made_places(recorded)]
        return self._places[recorded]

    def line_of(self, name: str) -> str:
        """Return the file and line where it sets or changes something of that name; empty if it does not name it."""
        found = ""
        for function in self.functions:
            try:
                lines, first = inspect.getsourcelines(function)
            except (OSError, TypeError):
                continue
            file = "/".join(Path(function.__code__.co_filename).parts[-2:])
            for number, line in enumerate(lines, first):
                if re.search(rf"\b{name}\b", line):
                    at = f"{file}:{number}"
                    if re.search(rf"\b{name}\b[^=]*(?<![=!<>])=(?!=)|\b{name}\b[^=(]*\.\w+\(", line):
                        return at
                    found = found or at
        return found

    def _made_places(self, recorded: bool) -> Iterator[Place]:
        for table, names in self._globals:
            yield names_place(str(table.get("__name__", "")).rpartition(".")[2], table, names, recorded)
        for kind, names in self._of_classes:
            yield class_place(kind, names, recorded)
        for name, cell in self._cells:
            yield closure_place(name, cell, recorded)


def _values(table: Mapping[str, Any], names: set[str]) -> Iterator[str]:
    """Return those of the names that a class or module binds to values."""
    for name in sorted(names & table.keys()):
        if not isinstance(table[name], (*CLOSED, property, staticmethod, classmethod, FunctionType)):
            yield name


def _function_of(value: Any) -> FunctionType | None:
    """Return the Python function in a method or property; None for anything else and for torch's own."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) and not value.__module__.startswith("torch.") else None


def is_of_torch(value: Any) -> bool:
    """Return True for a class or module of torch or of Python itself."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return f"{name}.".startswith(("torch.", "builtins."))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
