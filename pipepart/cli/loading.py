"""Loads the model of a command, given as ``path/to/file.py:factory`` or ``package.module:factory``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from .errors import UsageError

_FORMS = "path/to/file.py:factory or package.module:factory"
_RETURNS = "(model, sample, target, loss_fn), or the first one, two or three of these"


@dataclass(frozen=True)
class Given:
    """What a factory returns: a model and, if it knows them, a mini-batch of samples, its target, and the loss."""

    model: nn.Module
    sample: Any = None
    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None


def load_model(name: str) -> Given:
    """Import the file or module of ``name`` and call its factory.

    Raises:
        UsageError: there is no such file, module or factory, the factory needs arguments, or it returns no model.
        Exception: whatever the user's code raises.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UsageError(f"{name!r} does not name a model: write {_FORMS}")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = _import_file(Path(place)) if is_file else _import_module(place)
    return _given(name, _call(name, _find(module, place, attribute)))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UsageError(f"{str(path)!r} {what}: give the Python file in which the factory is")
    spec = importlib.util.spec_from_file_location("pipepart_model", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(path)!r} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # As `python path/to/file.py` has it: neighbours can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    # As `python -m` has it; the console script does not look here by itself.
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        hint = f"; for a file write {name}.py:factory" if Path(f"{name}.py").is_file() else ""
        raise UsageError(f"there is no module {error.name!r} here or in the environment{hint}") from None
    except (TypeError, ValueError):
        raise UsageError(f"{name!r} is not the name of a module: write {_FORMS}") from None


def _find(module: ModuleType, place: str, attribute: str) -> Any:
    found = getattr(module, attribute, None)
    if found is not None:
        return found
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    near = difflib.get_close_matches(attribute, own)
    if near:
        there = f"did you mean {' or '.join(near)}?"
    else:
        there = (
            f"it has {', '.join(own[:8])}{', ...' if len(own) > 8 else ''}"
            if own
            else "it defines no function"
        )
    raise UsageError(f"{place} has no {attribute!r}: {there}")


def _call(name: str, factory: Any) -> Any:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise UsageError(
            f"{name} is of type {type(factory).__name__}: give a function that returns {_RETURNS}"
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(
            f"{name} needs arguments ({', '.join(needed)}) and is called with none: "
            "give them defaults, or write a function that calls it"
        )
    return factory()


def _given(name: str, result: Any) -> Given:
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 4:
        raise UsageError(f"{name} returned a tuple of {len(parts)}: return {_RETURNS}")
    if not isinstance(parts[0], nn.Module):
        raise UsageError(f"{name} returned {_kinds(result)} where a model was expected: return {_RETURNS}")
    given = Given(*parts)
    if given.loss_fn is not None and not callable(given.loss_fn):
        raise UsageError(
            f"{name} returned {type(given.loss_fn).__name__} where a loss function was expected: return {_RETURNS}"
        )
    return given


def _kinds(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__
