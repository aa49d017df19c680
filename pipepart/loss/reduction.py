"""The loss function of a pipeline and its reduction: mean, sum, or computed once on the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from torch import nn

from . import torch_losses
from .returned import LossError, title


class Reduction(StrEnum):
    """How the losses of micro-batches are combined into the loss of the mini-batch."""

    MEAN = "mean"  # a mean over samples
    SUM = "sum"  # a sum over samples
    BATCH = "batch"  # computed once, on the gathered output


def declared_reduction(loss_fn: Callable[..., Any] | None) -> Reduction | None:
    """Return the reduction that a loss declares by an attribute or argument ``reduction``; None if there is none.

    Raises:
        LossError: it states that it does not reduce, or something else than a mean or a sum.
    """
    if isinstance(loss_fn, nn.Module):
        stated = getattr(loss_fn, "reduction", None)
    else:
        function, bound = _unbound(loss_fn)
        stated = bound.get("reduction")
        if "reduction" not in bound and torch_losses.is_torch_loss(function):
            stated = inspect.signature(function).parameters["reduction"].default
    if stated is None:
        return None
    try:
        return Reduction("mean" if stated == "batchmean" else stated)
    except ValueError:
        raise LossError(
            f"{title(loss_fn)} has reduction={stated!r}, which gives no scalar: use reduction='mean' or 'sum'"
        ) from None


def _unbound(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """The function behind ``functools.partial``, and the keyword arguments bound to it."""
    bound: dict[str, Any] = {}
    while isinstance(loss_fn, partial):
        bound = {**loss_fn.keywords, **bound}
        loss_fn = loss_fn.func
    return loss_fn, bound


class StepLoss:
    """The loss function of a pipeline.

    Args:
        loss_fn: the loss, which returns a scalar tensor or ``(sum, count)``; None where the model computes it.
        reduction: how losses of micro-batches make up that of the mini-batch; None to find it out.

    Attributes:
        patterns: what the calls of the last step are known to compute (:mod:`~.following`).
        calls: of torch, that the loss has made for the last micro-batch.
        certain: patterns of a function whose calls depend on the kinds of its arguments alone, by mini-batch.

    Raises:
        LossError: the loss states that it does not reduce, or the model computes it and it is to be computed at once.
    """

    def __init__(self, loss_fn: Callable[..., Any] | None, reduction: Reduction | None = None) -> None:
        declared_reduction(loss_fn)
        self.function = loss_fn
        self.reduction = reduction
        self.patterns: dict[Hashable, Any] = {}
        self.calls: Sequence[Any] = ()
        self.certain: dict[Hashable, dict[Hashable, Any]] = {}
        if loss_fn is None and reduction is Reduction.BATCH:
            raise LossError(
                "reduction='batch' needs a loss_fn: a model that computes its own loss sees one micro-batch. Compute "
                "it beside the model, from its output, and do not pass the model what makes it compute one (labels)"
            )
