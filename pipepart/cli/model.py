"""Loads and profiles the model of a command, named by its factory: ``path/to/file.py:factory(width=64)``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..data.arguments import Arguments
from ..data.split import batch_size
from ..measure import profile
from ..profiling import Profile, Roofline
from .errors import UsageError
from .files import read
from .output import note, user_output_to_stderr

_FORMS = "path/to/file.py:factory, package.module:factory or file.py:factory(width=64)"
_RETURNS = "(model, sample, target, loss_fn), or the first one, two or three of these"
_NAME = re.compile(r"(.+?):([^\W\d]\w*)(?:\((.*)\))?", re.DOTALL)
_SAMPLE = re.compile(r"(\d+(?:x\d+)*)(?::([a-z]+[0-9]*)(?::(\d+))?)?")
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_DTYPES = {name: getattr(torch, name) for name in (*_FLOATS, "int64", "int32", "int16", "int8", "uint8")}


@dataclass(frozen=True)
class Loaded:
    """What a factory returned: a model and optionally a mini-batch of samples, its target, and the loss."""

    model: nn.Module
    sample: Any = None
    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None


def load(name: str, sample: str | None) -> Loaded:
    """Import the file or module of ``name`` and call its factory; make a random sample if one is described.

    Args:
        name: file or module, and factory, with its arguments if it takes some.
        sample: description of a random sample, instead of the factory's own.

    Raises:
        UsageError: there is no such file, module or factory, the factory needs arguments, or it returns no model or
            no sample.
        Exception: whatever the user's code raises.
    """
    made_up = None if sample is None else make_sample(sample)
    match = _NAME.fullmatch(name)
    if not match:
        raise UsageError(f"{name!r} does not name a model: write {_FORMS}")
    place, attribute, arguments = match[1], match[2], match[3] or ""
    positional, keywords = _literals(name, arguments)
    with user_output_to_stderr():
        module = _import_file(Path(place)) if "/" in place or place.endswith(".py") else _import_module(place)
        factory = getattr(module, attribute, None)
        if not callable(factory):
            raise UsageError(f"{place} has no function {attribute!r}: it has {_functions(module)}")
        if isinstance(factory, nn.Module):
            result: Any = factory
        else:
            _check_call(name, factory, positional, keywords)
            result = factory(*positional, **keywords)
    loaded = _checked(name, result)
    if made_up is not None:
        return replace(loaded, sample=made_up)
    if loaded.sample is None:
        raise UsageError(
            f"{name} returned a model without a sample: let it return (model, sample), or describe one, "
            "as in --input 32x3x16x16"
        )
    return loaded


def measure(
    loaded: Loaded, micro_batches: Callable[[int], list[int]], roofline: str | None = None, **options: Any
) -> Profile:
    """Profile a model; warnings and notes go to standard error.

    Args:
        loaded: the model and its mini-batch.
        micro_batches: returns the numbers to measure, for the number of samples in the mini-batch.
        roofline: text or file of the speed for which to estimate times; None measures them.
        options: keywords of :func:`pipepart.profile`.

    Raises:
        Exception: as :func:`pipepart.profile` does.
    """
    if roofline is not None:
        speed = read(Roofline, Path(roofline)) if roofline.endswith(".json") else Roofline.parse(roofline)
        options |= {"measure": False, "roofline": speed}
    if loaded.loss_fn is None:
        note("no loss function: the backward starts with ones at the output, or at the model's own loss")
    with user_output_to_stderr(), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(str(message))
        measured = profile(
            loaded.model,
            loaded.sample,
            loss_fn=loaded.loss_fn,
            target=loaded.target,
            micro_batches=micro_batches(batch_size(Arguments.of(loaded.sample), loaded.target)),
            **options,
        )
    for text in measured.notes:
        note(text)
    return measured


def make_sample(text: str) -> Tensor:
    """Make a random tensor from ``SHAPE[:DTYPE[:BOUND]]``: normal numbers, or integers below the bound.

    The same text gives the same numbers. Without a bound, integers are 0 and 1, which every embedding has.

    Raises:
        UsageError: the text is not of this form.

    >>> make_sample("2x3").shape, make_sample("4x8:int64:100").dtype
    (torch.Size([2, 3]), torch.int64)
    """
    match = _SAMPLE.fullmatch(text)
    dtype = _DTYPES.get(match[2] or "float32") if match else None
    if not match or dtype is None or 0 in (shape := list(map(int, match[1].split("x")))):
        raise UsageError(
            f"--input {text!r} is not a shape: write for example 32x3x16x16, 32x100:float64 or, for tokens "
            f"of a vocabulary, 8x128:int64:50257; dtypes are {', '.join(_DTYPES)}"
        )
    generator = torch.Generator().manual_seed(0)
    try:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(int(match[3] or 2), shape, generator=generator, dtype=dtype)
    except RuntimeError as error:  # too large, or a bound of 0
        raise UsageError(f"--input {text!r}: {error}") from None


def _literals(name: str, text: str) -> tuple[list[Any], dict[str, Any]]:
    """Read the arguments in the parentheses behind a factory.

    >>> _literals("m:f", "64, depth=2, name='wide'")
    ([64], {'depth': 2, 'name': 'wide'})
    """
    try:
        call = ast.parse(f"factory({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        keywords = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return list(map(ast.literal_eval, call.args)), keywords
    except (SyntaxError, ValueError, AssertionError):
        raise UsageError(
            f"{name!r}: ({text}) are not arguments: give Python literals one by one, as in factory(64, name='wide')"
        ) from None


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipepart_model", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"{str(path)!r} is no Python file: give the file in which the factory is")
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
        raise UsageError(
            f"there is no module {error.name!r} here or in the environment; a file is named as {_FORMS}"
        ) from None
    except (TypeError, ValueError):
        raise UsageError(f"{name!r} is not the name of a module: write {_FORMS}") from None


def _functions(module: ModuleType) -> str:
    """Return the names of the module's own functions, for messages."""
    functions = inspect.getmembers(module, inspect.isfunction)
    names = [name for name, value in functions if value.__module__ == module.__name__ and name[0] != "_"]
    return ", ".join(names) or "none"


def _check_call(
    name: str, factory: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]
) -> None:
    """Refuse arguments that the factory does not take."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # built in: the call itself tells
        return
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        place = name.partition("(")[0]
        raise UsageError(
            f"{name} cannot be called: {error}. It takes {signature}: write them as in {place}(64, name='wide')"
        ) from None


def _checked(name: str, result: Any) -> Loaded:
    """Return what a factory returned, or refuse it."""
    parts = result if isinstance(result, tuple) else (result,)
    kinds = ", ".join(type(part).__name__ for part in parts)
    if not 1 <= len(parts) <= 4 or not isinstance(parts[0], nn.Module):
        raise UsageError(f"{name} returned {kinds}: return {_RETURNS}")
    if len(parts) == 4 and parts[3] is not None and not callable(parts[3]):
        raise UsageError(f"{name} returned {kinds}, and the last is no loss function: return {_RETURNS}")
    return Loaded(*parts)
