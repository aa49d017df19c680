"""Checks the arguments of ``save`` and ``load``: model, optimizers, schedulers, scaler and folder."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from ..input_error import InputError, InputTypeError

T = TypeVar("T")


def check_model(pipe: Any) -> None:
    """Raise a TypeError for what is neither a pipeline nor a module."""
    if not (isinstance(pipe, nn.Module) or isinstance(getattr(pipe, "module", None), nn.Module)):
        raise InputTypeError(f"a Pipeline or an nn.Module is saved and loaded, got {type(pipe).__name__}")


def checked_folder(folder: Any) -> Path:
    """Return a folder as an absolute path; refuse an empty text, as a variable that was not set is."""
    if not isinstance(folder, str | PathLike) or not isinstance(text := fspath(folder), str):
        raise InputTypeError(f"folder must be a path, got {type(folder).__name__}")
    if not text or "\0" in text:
        raise InputError(f"folder must be the path of a folder, got {text!r}")
    return Path(text).absolute()


def optimizers_of(pipe: Any, optimizer: Any) -> list[Optimizer]:
    """Return the optimizers as a list; by default those of a pipeline's stages."""
    of_stages = [] if isinstance(pipe, nn.Module) else list(pipe.optimizers)
    optimizers = several("optimizer", optimizer, Optimizer)
    if of_stages and optimizers:
        raise InputError(
            "the stages of the pipeline have optimizers of their own, which are taken: pass no optimizer"
        )
    return optimizers or of_stages


def several(name: str, values: Any, kind: type[T]) -> list[T]:
    """Return an argument as a list: None, one value of a kind, or a sequence of them."""
    items = list(values) if isinstance(values, list | tuple) else [] if values is None else [values]
    for item in items:
        if not isinstance(item, kind):
            raise InputTypeError(f"{name} must be {kind.__name__} of torch, got {type(item).__name__}")
    return items
