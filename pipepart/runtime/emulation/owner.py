"""Finds the parameter, buffer or attribute of a layer that holds a given tensor, to name it in an error."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .memory import storages

_STATE = frozenset({"_parameters", "_buffers", "_modules"})


def owner_of(tensor: Tensor, layers: Iterable[tuple[str, nn.Module]]) -> str:
    """Describe the parameter, buffer or attribute that shares the tensor's memory; "" if no layer holds it."""
    wanted = {storage._cdata for storage in storages(tensor)}
    for name, layer in layers:
        title = f"layer {name!r} ({type(layer).__name__})"
        for path, part in layer.named_modules():
            prefix = f"{path}." if path else ""
            for kind, group in (("parameter", part._parameters), ("buffer", part._buffers)):
                for key, held in group.items():
                    if _holds(held, wanted):
                        return f"{kind} {prefix + key!r} of {title}"
            for key, value in vars(part).items():
                if key not in _STATE and _holds(value, wanted):
                    return (
                        f"attribute {prefix + key!r} of {title}, which does not move with its layer: hold it as a "
                        f"buffer, self.register_buffer({key!r}, ...)"
                    )
    return ""


def _holds(value: object, wanted: set[int]) -> bool:
    if isinstance(value, list | tuple | dict) and not isinstance(value, torch.Size):
        return any(_holds(leaf, wanted) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return isinstance(value, Tensor) and any(storage._cdata in wanted for storage in storages(value))
