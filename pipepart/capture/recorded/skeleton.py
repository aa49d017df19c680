"""Finds what a recorded forward changes beside the tensors that it computes: attributes, lists and buffers of modules.

A replay runs functions of torch and whole modules. What the Python code between them sets on a module would happen
while recording only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor, nn

from .refusal import SkeletonError

_TABLES = ("_parameters", "_buffers", "_modules")


class Change(NamedTuple):
    """What a forward has done to an attribute of its module.

    Attributes:
        path, module, name: the module, and the attribute.
        does: "sets" or "changes".
        tensor: what was set, if it is a tensor that took the place of another or of None, and no buffer.
    """

    path: str
    module: nn.Module
    name: str
    does: str
    tensor: Tensor | None = None

    def refused(self, does: str = "") -> SkeletonError:
        """Return the error that names it, with what the forward ``does`` to it."""
        error = SkeletonError(
            f"the forward of {self.path or 'the model'} ({type(self.module).__name__}) {does or self.does} "
            f"self.{self.name}{_line(self.module, self.name)}, which a replay would not repeat. Set it before the "
            "step, register a buffer and write it in place, or move that code into a module of its own"
        )
        error.culprit = self.path
        return error


class Watched:
    """The attributes of the modules whose forward is recorded.

    Args:
        modules: with their paths.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._before = [(path, module, _bound(module), _contents(module)) for path, module in modules]

    def changes(self) -> list[Change]:
        """Return the attributes that the forwards have bound anew, and lists and dicts that they have changed."""
        found = []
        for path, module, bound, contents in self._before:
            now = _bound(module)
            for name in sorted({*bound, *now}):
                was, value = bound.get(name), now.get(name)
                if was is not value:
                    aside = isinstance(value, Tensor) and isinstance(was, Tensor | None)
                    tensor = value if aside and name not in module._buffers else None
                    found.append(Change(path, module, name, "sets", tensor))
            for name, before in contents.items():
                if name in now and _items(now[name]) != before:
                    found.append(Change(path, module, name, "changes"))
        return found


def innermost(error: BaseException, modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Return the path of the innermost of these modules whose forward raised an error; empty for the model."""
    paths = {id(module): path for path, module in modules}
    found = ""
    at: TracebackType | None = error.__traceback__
    while at is not None:
        owner = at.tb_frame.f_locals.get("self")
        found = paths.get(id(owner), found)
        at = at.tb_next
    return found


def _bound(module: nn.Module) -> dict[str, Any]:
    return {**_own(module), **module._parameters, **module._buffers, **module._modules}


def _contents(module: nn.Module) -> dict[str, list[int]]:
    return {
        name: _items(value) for name, value in _own(module).items() if isinstance(value, list | dict | set)
    }


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TABLES}


def _items(value: Any) -> list[int]:
    return [id(item) for item in (value.values() if isinstance(value, dict) else value)]


def _line(module: nn.Module, name: str) -> str:
    """Return where the class names the attribute, as far as its source is at hand."""
    try:
        lines, first = inspect.getsourcelines(type(module).forward)
        file = inspect.getsourcefile(type(module).forward) or ""
    except (OSError, TypeError):
        return ""
    number = next((first + i for i, line in enumerate(lines) if f"self.{name}" in line), None)
    return "" if number is None else f" at {'/'.join(Path(file).parts[-2:])}:{number}"
