"""What a tensor is that was used where it does not live: the layer's attribute that holds it, if one does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .ledger import storages

_OWN = frozenset({"_parameters", "_buffers", "_modules"})


def held_by(tensor: Tensor, layers: Iterable[tuple[str, nn.Module]]) -> str:
    """A text about the parameter, buffer or attribute that shares the tensor's memory; "" if there is none."""
    wanted = {storage._cdata for storage in storages(tensor)}
    for name, layer in layers:
        title = f"layer {name!r} ({type(layer).__name__})"
        for path, part in layer.named_modules():
            prefix = f"{path}." if path else ""
            for kind, group in (("parameter", part._parameters), ("buffer", part._buffers)):
                for key, held in group.items():
                    if _is_in(held, wanted):
                        return f"{kind} {prefix + key!r} of {title}"
            for key, value in vars(part).items():
                if key not in _OWN and _is_in(value, wanted):
                    return (
                        f"attribute {prefix + key!r} of {title}, which does not move with its layer: hold it as a "
                        f"buffer, self.register_buffer({key!r}, ...)"
                    )
    return ""


def _is_in(value: object, wanted: set[int]) -> bool:
    found: Sequence[object] = (
        (value,) if isinstance(value, Tensor) else pytree.tree_leaves(value) if _is_nest(value) else ()
    )
    return any(
        isinstance(leaf, Tensor) and any(storage._cdata in wanted for storage in storages(leaf))
        for leaf in found
    )


def _is_nest(value: object) -> bool:
    return isinstance(value, list | tuple | dict) and not isinstance(value, torch.Size)
