"""Context managers that restore a model after it ran: parameters, buffers, attributes and random states."""

from __future__ import annotations

import random
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..generators import draws_undone
from .hooks import HOOKS
from .placeholders import copied
from .recorded.python_state.access import rebind


@contextmanager
def shadow_parameters(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Run the model on copies of its parameters and buffers within the block; afterwards it is :func:`restored`.

    Gradients are accumulated in the copies. Layers that write into their parameters or buffers write into the copies.
    Hooks on a parameter or its gradient are not called. Each trained copy starts with a gradient of zeros, so that a
    backward adds to it.

    Args:
        model: the model.
        device: where the copies are; by default where the model is. A tensor on the meta device becomes a real one on
            another device, as in :func:`copied`, and so does one that is a plain attribute of a module.
    """
    with draws_restored(model, device):
        shadows: dict[Tensor, Tensor] = {
            parameter: _shadow(parameter, device) for parameter in model.parameters()
        }
        shadows |= {buffer: copied(buffer, device) for buffer in model.buffers()}
        with exchanged(model, shadows), bindings_restored(model):
            _make_attributes_real(model, device)
            yield


@contextmanager
def exchanged(model: nn.Module, tensors: dict[Tensor, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers of a model within the block. The mapping is from old to new tensors."""
    try:
        _exchange(model, tensors)
        yield
    finally:
        _exchange(model, {other: original for original, other in tensors.items()})


@contextmanager
def restored(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """After the block, restore the random states and the attribute bindings of each module.

    The random states are those of torch, ``random`` and numpy. Attributes are parameters, buffers, the mode and
    anything that a ``forward`` assigns, such as a counter. A value that is changed in place, such as a list that is
    appended to, stays changed. ``device`` is one that the model is not on, whose random state is restored as well.
    """
    with draws_restored(model, device), bindings_restored(model):
        yield


@contextmanager
def draws_restored(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """After the block, restore the random states of torch, ``random`` and numpy.

    Args:
        model: the model. The generators of the devices that it is on are restored.
        device: another device whose generator is restored.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    used = {device or torch.device("cpu"), *(tensor.device for tensor in model.parameters())}
    devices = [each for each in used if each.type not in ("cpu", "meta")]
    with draws_undone(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def bindings_restored(model: nn.Module) -> Iterator[None]:
    """After the block, restore each module's attributes, parameters, buffers and hooks to the same objects."""
    modes = [(module, module.training) for module in model.modules()]
    before = [
        [
            (table, dict(table))
            for table in (vars(module), module._parameters, module._buffers, *_hook_tables(module))
        ]
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for tables in before:
            for table, bound in tables:
                rebind(table, {**table, **bound}, bound)
        for module, training in modes:  # a TorchScript module has its mode elsewhere
            if module.training is not training:
                module.training = training


def _hook_tables(module: nn.Module) -> list[MutableMapping[Any, Any]]:
    held = vars(module)
    return [held[name] for name in HOOKS if name in held]  # a TorchScript module has fewer


def _exchange(model: nn.Module, tensors: dict[Tensor, Tensor]) -> None:
    # By setattr: a module such as an LSTM keeps its parameters in a second place, too, and updates it there.
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor in tensors:
                setattr(module, name, tensors[tensor])


def _shadow(parameter: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    shadow = nn.Parameter(copied(parameter, device), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        shadow.grad = torch.zeros_like(shadow)
    return shadow


def _make_attributes_real(model: nn.Module, device: torch.device | None) -> None:
    if device is None or device.type == "meta":
        return
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                vars(module)[name] = copied(value, device)
