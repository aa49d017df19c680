"""Raises an error if a layer reads values that depend on made-up tensors of a model on the meta device.

::

    argument (real) ─▶ mask.all() ─▶ read: as in training
    argument ─▶ matmul ─▶ mean() ─▶ read: error
    weight (made up) ┘    made up
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..autograd.dispatch_mode import DispatchMode
from ..autograd.own_copy import tensors
from ..capture import CaptureError, is_placeholder, mark_placeholder


class ReadsRefused(DispatchMode):
    """Tracks made-up tensors and the results computed from them, and raises CaptureError if a layer reads a value.

    Args:
        name: name of the layer, for the error message.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = tensors((args, kwargs))
        if not any(map(is_placeholder, inputs)):
            return func(*args, **kwargs)
        if _reads_values(func, args):
            raise CaptureError(
                f"layer {self._name!r} reads values of tensors ({func.name()}), which the model on the meta device "
                "does not have: load its weights on the CPU and profile it with device=..., which needs room for one "
                "layer there, or compute with tensors (torch.where) in place of reading values"
            )
        result = func(*args, **kwargs)
        for tensor in (*tensors(result), *(inputs if func._schema.is_mutable else ())):
            mark_placeholder(tensor)
        return result


def _reads_values(operation: Any, args: Sequence[Any]) -> bool:
    """Return True if the operation returns a Python number or a shape that depends on values of tensors."""
    if operation is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    tags = operation.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
