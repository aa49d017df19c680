"""Moves layers that have values to the devices of their stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..state.shadow import Layers
from .swapping import swap_values


def move(groups: Sequence[Layers], homes: Sequence[torch.device]) -> None:
    """Move each group of layers to its device. Tensors shared by several groups go to the device of the first."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for home, layers in zip(reversed(homes), reversed(groups), strict=True):
        for _, module in layers:
            for part in module.modules():
                _move_to_unlike(part, home, replaced)
            module.to(home)


def _move_to_unlike(part: nn.Module, home: torch.device, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
    """Move parameters to a device for which torch would create new parameter objects.

    The parameters stay the objects that optimizers hold. A parameter that a graph holds is replaced in all layers that
    share it.
    """
    there = torch.empty((), device=home)
    for key, parameter in part._parameters.items():
        if parameter is None or _set_in_place(parameter, there):
            continue
        if parameter not in replaced:
            now = swap_values(parameter, parameter.detach().to(home))
            assert isinstance(now, nn.Parameter)
            if now is not parameter:
                replaced[parameter] = now
        part._parameters[key] = replaced.get(parameter, parameter)


def _set_in_place(tensor: Tensor, there: Tensor) -> bool:
    """Return True if torch can set ``.data`` to a tensor of the other device, as between CPU and CUDA."""
    return torch._has_compatible_shallow_copy_type(tensor, there)  # type: ignore[attr-defined]
