"""Moves the tensors of a recorded call to one device, because the model may be spread over several devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...autograd.own_copy import tensors
from ..sequential import state_of


def home(module: nn.Module) -> torch.device | None:
    """Return the device of the first parameter or buffer of a module."""
    return next((tensor.device for tensor in state_of(module)), None)


def is_on_meta(model: nn.Module) -> bool:
    """Return True if the parameters of a model are on the meta device."""
    return next((parameter.is_meta for parameter in model.parameters()), False)


def is_parted(model: nn.Module) -> bool:
    """Return True if the parameters of a model are on more than one device."""
    return len({parameter.device for parameter in model.parameters()}) > 1


def together(nest: Any) -> Any:
    """Move the tensors of a nest to the device of its last tensor."""
    devices = [tensor.device for tensor in tensors(nest) if tensor.dim()]
    return nest if len(set(devices)) < 2 else at(devices[-1], nest)


def at(device: torch.device | None, nest: Any) -> Any:
    """Move the tensors of a nest to a device; None and the meta device leave them where they are."""
    if device is None or device.type == "meta":
        return nest
    return pytree.tree_map_only(
        Tensor, lambda t: t if t.device == device or not t.dim() else t.to(device), nest
    )
