"""Checks the arguments of ``save`` and ``load``: model, optimizers, schedulers, scaler and folder."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..input_error import InputError, InputTypeError

T = TypeVar("T")


def check_model(pipe: Any) -> None:
    """Check that a model can be saved and loaded.

    Raises:
        TypeError: it is neither a pipeline nor a module.
    """
    if not (isinstance(pipe, nn.Module) or isinstance(getattr(pipe, "module", None), nn.Module)):
        raise InputTypeError(f"a Pipeline or an nn.Module is saved and loaded, got {type(pipe).__name__}")


def checked_folder(folder: Any) -> Path:
    """Return a folder as an absolute path.

    Raises:
        TypeError: it is no path.
        ValueError: it is empty, as a variable that was not set is, or has a zero character.
    """
    if not isinstance(folder, str | PathLike) or not isinstance(text := fspath(folder), str):
        raise InputTypeError(f"folder must be a path, got {type(folder).__name__}")
    if not text or "\0" in text:
        raise InputError(f"folder must be the path of a folder, got {text!r}")
    return Path(text).absolute()


def optimizers_of(pipe: Any, optimizer: Any) -> list[Optimizer]:
    """Return the optimizers as a list; by default those of a pipeline's stages.

    Raises:
        TypeError: ``optimizer`` is neither an optimizer of torch nor a sequence of them.
        ValueError: the stages have optimizers, and others are given.
    """
    of_stages: Sequence[Optimizer] = () if isinstance(pipe, nn.Module) else pipe.optimizers
    optimizers = _several("optimizer", optimizer, Optimizer)
    if of_stages and optimizers:
        raise InputError(
            "the stages of the pipeline have optimizers of their own, which are taken: pass no optimizer"
        )
    return optimizers or list(of_stages)


def schedulers_of(scheduler: Any) -> list[LRScheduler]:
    """Return the learning-rate schedulers as a list.

    Raises:
        TypeError: one is none.
    """
    return _several("scheduler", scheduler, LRScheduler)


def checked_scaler(scaler: Any) -> torch.amp.GradScaler | None:
    """Return a GradScaler, or None for None.

    Raises:
        TypeError: it is none.
    """
    return scaler if scaler is None else _checked("scaler", scaler, torch.amp.GradScaler)


def _several(name: str, values: Any, kind: type[T]) -> list[T]:
    items = list(values) if isinstance(values, list | tuple) else [] if values is None else [values]
    return [_checked(name, item, kind) for item in items]


def _checked(name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise InputTypeError(f"{name} must be {kind.__name__} of torch, got {type(value).__name__}")
    return value
