"""Whether a loss gives a scalar: of a value, and of a function before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ..capture import TensorSpec
from .pair import is_pair


def check_scalar(loss: Any, what: str = "the loss") -> Tensor:
    """The loss.

    Raises:
        ValueError: it is no tensor without dimensions.
    """
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise ValueError(
        f"{what} must be a scalar tensor, got {got}: sum it up with .mean() or .sum(), or return (sum, count), "
        "two scalars, for a mean over something else than samples"
    )


def scalar_of(value: Any) -> Tensor:
    """What a backward of a loss starts from: of a sum and its count the sum.

    Raises:
        ValueError: as :func:`check_scalar`.
    """
    return value[0] if is_pair(value) else check_scalar(value)


def value_of(value: Any) -> Tensor:
    """What a loss is for the samples that it was called with: of a sum and its count the mean.

    Raises:
        ValueError: as :func:`check_scalar`.
    """
    return value[0] / value[1] if is_pair(value) else check_scalar(value)


def check_loss_is_scalar(
    loss_fn: Callable[..., Tensor], outputs: Sequence[TensorSpec], target: Any, samples: int
) -> None:
    """Calls the loss on fake tensors shaped like the planned output of one micro-batch.

    Where it cannot be tried so (an unknown or nested output, a loss that reads values) nothing is said: the first
    micro-batch will tell.

    Raises:
        ValueError: it gives no scalar.
    """
    if len(outputs) != 1 or not outputs[0].shape:
        return
    shape = (samples, *outputs[0].shape[1:])
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            output = torch.empty(shape, dtype=getattr(torch, outputs[0].dtype))
            arguments = () if target is None else (pytree.tree_map_only(Tensor, mode.from_tensor, target),)
            loss = loss_fn(output, *arguments)
    except Exception:
        return
    scalar_of(loss)
