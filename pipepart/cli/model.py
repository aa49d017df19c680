"""Loads and profiles the model of a command, given as ``path/to/file.py:factory`` or ``package.module:factory``."""

from __future__ import annotations

import difflib
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
from ..profiling import Profile, profile
from .errors import UsageError
from .output import note, user_output_to_stderr

_FORMS = "path/to/file.py:factory or package.module:factory"
_RETURNS = "(model, sample, target, loss_fn), or the first one, two or three of these"
_SAMPLE = re.compile(r"(\d+(?:x\d+)*)(?::([a-z]+[0-9]*)(?::(\d+))?)?")
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True)
class Given:
    """What a factory returns: a model and, if it knows them, a mini-batch of samples, its target, and the loss."""

    model: nn.Module
    sample: Any = None
    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None


def measure(
    name: str, sample: str | None, micro_batches: Callable[[int], list[int]], **options: Any
) -> Profile:
    """Load and profile a model.

    Args:
        name: file or module, and factory.
        sample: description of a random sample, instead of the factory's own.
        micro_batches: returns the numbers to measure, for the number of samples in the mini-batch.
        options: keywords of :func:`pipepart.profile`.

    Raises:
        UsageError: the model cannot be loaded, or there is no sample.
        Exception: as :func:`pipepart.profile` does.
    """
    with user_output_to_stderr(), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(str(message))
        given = load(name, sample)
        if given.loss_fn is None:
            target = "" if given.target is None else "a target and "
            note(
                f"{target}no loss function: the backward starts with ones at the output, or at the model's own loss"
            )
        batch = batch_size(Arguments.of(given.sample), given.target)
        found = profile(
            given.model,
            given.sample,
            loss_fn=given.loss_fn,
            target=given.target,
            micro_batches=micro_batches(batch),
            **options,
        )
        for text in found.notes:
            note(text)
        return found


def load(name: str, sample: str | None) -> Given:
    """Import the file or module of ``name`` and call its factory; make up the sample if one is described.

    Raises:
        UsageError: there is no such file, module or factory, the factory needs arguments, or it returns no model or
            no sample.
        Exception: whatever the user's code raises.
    """
    made_up = None if sample is None else make_sample(sample)
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise UsageError(f"{name!r} does not name a model: write {_FORMS}")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = _import_file(Path(place)) if is_file else _import_module(place)
    given = _given(name, _call(name, _find(module, place, attribute)))
    if made_up is not None:
        return replace(given, sample=made_up)
    if given.sample is None:
        raise UsageError(
            f"{name} returned a model without a sample: let it return (model, sample), or describe one, "
            "as in --input 32x3x16x16"
        )
    return given


def make_sample(text: str) -> Tensor:
    """Make normally distributed numbers, or integers below a bound, from ``SHAPE[:DTYPE[:BOUND]]``.

    The same text gives the same numbers. Without a bound, integers are 0 and 1, which every embedding has.

    Raises:
        UsageError: the text is not of this form.

    >>> make_sample("2x3").shape, make_sample("4x8:int64:100").dtype
    (torch.Size([2, 3]), torch.int64)
    """
    match = _SAMPLE.fullmatch(text)
    if not match:
        raise UsageError(
            f"--input {text!r} is not a shape: write for example 32x3x16x16, 32x100:float64 or, for tokens "
            "of a vocabulary, 8x128:int64:50257"
        )
    shape, name = [int(extent) for extent in match[1].split("x")], match[2] or "float32"
    if 0 in shape:
        raise UsageError(f"--input {text!r} holds nothing: each number of the shape must be at least 1")
    if name not in _FLOATS + _INTEGERS:
        raise UsageError(
            f"--input {text!r}: no dtype {name!r}, choose one of {', '.join(_FLOATS + _INTEGERS)}"
        )
    dtype, generator = getattr(torch, name), torch.Generator().manual_seed(0)
    if name in _FLOATS:
        if match[3]:
            raise UsageError(f"--input {text!r}: a bound is for whole numbers, {name} takes none")
        try:
            return torch.randn(shape, generator=generator).to(dtype)
        except RuntimeError as error:  # torch cannot allocate it
            raise UsageError(f"--input {text!r} does not fit in memory: {error}") from None
    bound, most = int(match[3] or 2), torch.iinfo(dtype).max
    if not 1 <= bound <= most:
        raise UsageError(f"--input {text!r}: the bound of {name} must be between 1 and {most}, got {bound}")
    return torch.randint(bound, shape, generator=generator).to(dtype)


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


def _call(name: str, factory: Any) -> Any:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise UsageError(
            f"{name} is of type {type(factory).__name__}: give a function that returns {_RETURNS}"
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UsageError(
            f"{name} is called with no arguments, and it needs some ({error}): "
            "give them defaults, or write a function that calls it"
        ) from None
    return factory()


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
