"""What a loss returns: a scalar with a gradient, or a sum and a count."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .refusal import LossError, title


def check_scalar(loss: Any, what: str = "the loss") -> Tensor:
    """The loss.

    Raises:
        LossError: it is no tensor without dimensions.
    """
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise LossError(
        f"{what} must be a scalar tensor, got {got}: sum it up with .mean() or .sum(), or return (sum, count), "
        "two scalars, for a mean over something else than samples"
    )


def check_gradient(loss: Tensor, loss_fn: Any) -> None:
    """Refuses a loss that a plain backward would refuse.

    Raises:
        LossError: it has no graph, or is no real floating-point number.
    """
    if not loss.is_floating_point():
        raise LossError(
            f"{title(loss_fn)} is of type {loss.dtype}: a gradient needs a real floating-point scalar"
        )
    if not loss.requires_grad:
        raise LossError(
            f"{title(loss_fn)} has no gradient: it does not depend on a parameter, or was detached or computed under "
            "no_grad"
        )


def sum_of(value: Any) -> Tensor:
    """What a backward of a loss starts from: of a sum and its count the sum.

    Raises:
        LossError: as :func:`check_scalar`.
    """
    return value[0] if is_pair(value) else check_scalar(value)


def value_of(value: Any) -> Tensor:
    """What a loss is for the samples that it was called with: of a sum and its count the mean.

    Raises:
        LossError: as :func:`check_scalar`.
    """
    return value[0] / value[1] if is_pair(value) else check_scalar(value)


def is_pair(value: Any) -> bool:
    """Return True for ``(sum, count)``: a scalar tensor, and a scalar tensor or a number."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    loss, count = value
    if not isinstance(loss, Tensor) or loss.dim():
        return False
    return not count.dim() if isinstance(count, Tensor) else isinstance(count, int | float)
