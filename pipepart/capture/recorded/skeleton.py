"""Finds what a recorded forward changes beside the tensors that it computes: attributes, lists and buffers of modules.

A replay runs functions of torch and whole modules. What the Python code between them sets on a module would happen
while recording only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from .refusal import SkeletonError

_TABLES = ("_parameters", "_buffers", "_modules")


class Watched:
    """The attributes of the modules whose forward is recorded.

    Args:
        modules: with their paths.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._before = [(path, module, _bound(module), _contents(module)) for path, module in modules]

    def check(self) -> list[tuple[str, Tensor]]:
        """Check that all modules are as they were, but for attributes that were bound to tensors; return these.

        Raises:
            SkeletonError: a forward has set an attribute or changed a list or dict of its module.
        """
        aside = []
        for path, module, bound, contents in self._before:
            now = _bound(module)
            for name in sorted({*bound, *now}):
                was, found = bound.get(name), now.get(name)
                if was is found:
                    continue
                if (
                    not isinstance(found, Tensor)
                    or not isinstance(was, Tensor | None)
                    or name in module._buffers
                ):
                    raise refused(path, module, name, "sets")
                aside.append((f"{path}.{name}" if path else name, found))
            for name, before in contents.items():
                if _items(now[name]) != before:
                    raise refused(path, module, name, "changes")
        return aside


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


def refused(path: str, module: nn.Module, name: str, does: str) -> SkeletonError:
    """Return the error for an attribute of an open module that its forward ``does`` something to."""
    error = SkeletonError(
        f"the forward of {path or 'the model'} ({type(module).__name__}) {does} self.{name}{_line(module, name)}, "
        "which a replay would not repeat. Set it before the step, register a buffer and write it in place, or move "
        "that code into a module of its own"
    )
    error.culprit = path
    return error


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
