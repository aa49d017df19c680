"""Loads and profiles the model of a command, named by its factory: ``path/to/file.py:factory(width=64)``."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..data.arguments import Arguments
from ..data.split import batch_size
from ..measure import profile
from ..profiling import Profile
from .errors import UsageError
from .output import note, user_output_to_stderr
from .samples import cast_floats, make_sample

_FORMS = "path/to/file.py:factory, package.module:factory or file.py:factory(width=64)"
_RETURNS = "(model, sample, target, loss_fn), or the first one, two or three of these"
_CALLED = re.compile(r"(.+?):([^\W\d]\w*)(?:\((.*)\))?", re.DOTALL)


@dataclass(frozen=True)
class Given:
    """Result of a factory: a model and optionally a mini-batch of samples, its target, and the loss."""

    model: nn.Module
    sample: Any = None
    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None


def measure(
    name: str,
    sample: str | None,
    micro_batches: Callable[[int], list[int]],
    dtype: str | None = None,
    **options: Any,
) -> Profile:
    """Load and profile a model.

    Args:
        name: file or module, and factory.
        sample: description of a random sample, instead of the factory's own.
        micro_batches: returns the numbers to measure, for the number of samples in the mini-batch.
        dtype: of the model and of floating point tensors; None for their own.
        options: keywords of :func:`pipepart.profile`.

    Raises:
        UsageError: the model cannot be loaded, or there is no sample.
        Exception: as :func:`pipepart.profile` does.
    """
    with user_output_to_stderr():
        given = load(name, sample, dtype)
        if given.loss_fn is None:
            target = "" if given.target is None else "a target and "
            note(
                f"{target}no loss function: the backward starts with ones at the output, or at the model's own loss"
            )
        return measure_given(given, micro_batches, **options)


def measure_given(given: Given, micro_batches: Callable[[int], list[int]], **options: Any) -> Profile:
    """Profile a model that is loaded; warnings are notes on standard error. Arguments as :func:`measure`."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(str(message))
        found = profile(
            given.model,
            given.sample,
            loss_fn=given.loss_fn,
            target=given.target,
            micro_batches=micro_batches(batch_size(Arguments.of(given.sample), given.target)),
            **options,
        )
    for text in found.notes:
        note(text)
    return found


def load(name: str, sample: str | None, dtype: str | None = None) -> Given:
    """Import the file or module of ``name`` and call its factory; make a random sample if one is described.

    Args:
        name: file or module, and factory, with its arguments if it takes some.
        sample: description of a random sample, instead of the factory's own.
        dtype: to cast the model and floating point tensors to; None to leave them.

    Raises:
        UsageError: there is no such file, module or factory, the factory needs arguments, or it returns no model or
            no sample.
        Exception: whatever the user's code raises.
    """
    made_up = None if sample is None else make_sample(sample)
    match = _CALLED.fullmatch(name)
    if not match:
        raise UsageError(f"{name!r} does not name a model: write {_FORMS}")
    place, attribute, arguments = match[1], match[2], _literals(name, match[3] or "")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    try:
        module = _import_file(Path(place)) if is_file else _import_module(place)
        given = _given(name, _call(name, _find(module, place, attribute), *arguments))
    except SystemExit as ended:
        raise UsageError(
            f"{name} ended the program, with {ended.code!r}, and returned no model: what runs when the file is "
            'executed goes under `if __name__ == "__main__":`'
        ) from None
    if made_up is not None:
        given = replace(given, sample=made_up)
    if given.sample is None:
        raise UsageError(
            f"{name} returned a model without a sample: let it return (model, sample), or describe one, "
            "as in --input 32x3x16x16"
        )
    return (
        given
        if dtype is None
        else replace(
            given,
            model=given.model.to(getattr(torch, dtype)),
            sample=cast_floats(given.sample, dtype),
            target=cast_floats(given.target, dtype),
        )
    )


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
    there = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(own) or 'no function'}"
    raise UsageError(f"{place} has no {attribute!r}: {there}")


def _literals(name: str, text: str) -> tuple[list[Any], dict[str, Any]]:
    """Read the arguments in the parentheses behind a factory.

    >>> _literals("m:f", "64, depth=2, name='wide'")
    ([64], {'depth': 2, 'name': 'wide'})
    """
    try:
        call = ast.parse(f"factory({text})", mode="eval").body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UsageError(
            f"{name!r}: ({text}) are not arguments: write them as in Python, file.py:factory(width=64)"
        )
    given = [*call.args, *(each.value for each in call.keywords)]
    read = []
    for each in given:
        try:
            read.append(ast.literal_eval(each))
        except ValueError:
            raise UsageError(
                f"{name!r}: argument {ast.unparse(each)} is no literal: give numbers, 'text', True, False, None, or "
                "lists, tuples and dicts of these"
            ) from None
    if any(each.arg is None for each in call.keywords):
        raise UsageError(f"{name!r}: write the arguments one by one, without **")
    positional = read[: len(call.args)]
    return positional, dict(
        zip([each.arg or "" for each in call.keywords], read[len(positional) :], strict=True)
    )


def _call(name: str, factory: Any, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    if isinstance(factory, nn.Module) and not positional and not keywords:
        return factory
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UsageError(
            f"{name} is of type {type(factory).__name__}: give a function that returns {_RETURNS}"
        )
    try:
        signature = inspect.signature(factory)
    except ValueError:  # built in: the call itself tells
        return factory(*positional, **keywords)
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        example = ", ".join(
            f"{each.name}=..."
            for each in signature.parameters.values()
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        )
        place = name.partition("(")[0]
        raise UsageError(
            f"{name} cannot be called: {error}. It takes {signature}: write {place}({example})"
        ) from None
    return factory(*positional, **keywords)


def _given(name: str, result: Any) -> Given:
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 4:
        raise UsageError(f"{name} returned a tuple of {len(parts)}: return {_RETURNS}")
    if not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(f"{name} returned {kinds} where a model was expected: return {_RETURNS}")
    given = Given(*parts)
    if given.loss_fn is not None and not callable(given.loss_fn):
        raise UsageError(
            f"{name} returned {type(given.loss_fn).__name__} where a loss function was expected: return {_RETURNS}"
        )
    return given
