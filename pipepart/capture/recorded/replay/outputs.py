"""Finds the loss in the output of a model, and compares two outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....relative_errors import relative_error
from .given import Ref, same_value


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.dim()


def own_loss(output: Any, is_scalar: Callable[[Any], bool] = _is_scalar) -> Any:
    """Return the loss in the output of a model; None if there is none.

    The loss is called ``loss`` in a dict or an object. In a tuple it is the first entry if that is a scalar, as in
    ``(loss, logits)``, or the only scalar, as in ``(logits, loss)``. Any other output is the loss itself.
    """
    if isinstance(output, dict):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    if not isinstance(output, tuple | list) or isinstance(output, Ref):
        return output
    scalars = [value for value in output if is_scalar(value)]
    return scalars[0] if len(scalars) == 1 or (scalars and scalars[0] is output[0]) else None


def same_outputs(first: Any, second: Any, exactly: bool = True) -> bool:
    """Return True if two outputs of a model are equal, bit for bit or up to rounding. NaN equals NaN."""
    left, spec = pytree.tree_flatten(first)
    right, spec_of_other = pytree.tree_flatten(second)
    return spec == spec_of_other and all(_same(a, b, exactly) for a, b in zip(left, right, strict=True))


def _same(first: Any, second: Any, exactly: bool) -> bool:
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return same_value(first, second)
    first, second = first.detach(), second.detach().to(first.device)
    allowed = 0.0 if exactly or not first.is_floating_point() else torch.finfo(first.dtype).eps ** 0.5
    return relative_error(first, second, floor=1.0) <= allowed
