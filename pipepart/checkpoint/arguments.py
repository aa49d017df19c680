"""Checks the arguments of ``save`` and ``load``: model, optimizers, schedulers, scaler and folder."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..input_error import InputError, InputTypeError


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
    given = [] if optimizer is None else _several(optimizer)
    if of_stages and given:
        raise InputError(
            "the stages of the pipeline have optimizers of their own, which are taken: pass no optimizer"
        )
    for one in given:
        if not isinstance(one, Optimizer):
            raise InputTypeError(
                f"optimizer must be an optimizer of torch, or a list of them, got {type(one).__name__}"
            )
    return given or list(of_stages)


def schedulers_of(scheduler: Any) -> list[LRScheduler]:
    """Return the learning-rate schedulers as a list.

    Raises:
        TypeError: one is none.
    """
    found = [] if scheduler is None else _several(scheduler)
    for one in found:
        if not isinstance(one, LRScheduler):
            raise InputTypeError(
                "scheduler must be a scheduler of torch.optim.lr_scheduler, or a list of them, got "
                f"{type(one).__name__}"
            )
    return found


def checked_scaler(scaler: Any) -> torch.amp.GradScaler | None:
    """Return a GradScaler, or None for None.

    Raises:
        TypeError: it is none.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputTypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    return scaler


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]
