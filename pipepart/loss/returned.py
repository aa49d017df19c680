"""Checks the value that a loss returns, and builds the error for an unsupported loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..capture import loss_of
from ..input_error import InputError

_CHOICES = """
The loss is called once for each micro-batch, and these calls must add up to the loss of the mini-batch. Choose one:
  - one call of torch's losses, .mean() or .sum() of what keeps samples apart, or a sum of such terms times numbers:
        loss_fn = lambda output, target: F.cross_entropy(output, target) + 0.1 * output.pow(2).mean()
  - return the sum and what it is divided by; the step divides the sum of sums by the sum of counts:
        def loss_fn(output, target):
            kept = (target != -100).float()                # 1 for what counts
            losses = ...                                   # one loss for each, not reduced
            return (losses * kept).sum(), kept.sum()
  - declare that it is a mean (or a sum) over samples: Pipeline(..., reduction="mean")
  - compute it once on the whole mini-batch, whatever it is: Pipeline(..., reduction="batch"), with a schedule that runs
    all forwards first, such as schedule="gpipe\""""

_CHOICES_OF_OWN = """
The model computes its loss once for each micro-batch, and these must add up to the loss of the mini-batch. Choose one:
  - declare that it is a mean (or a sum) over samples: each micro-batch then counts by its number of samples:
        Pipeline(..., reduction="mean")
  - compute it beside the model, on its output for the whole mini-batch, whatever it is, with a schedule that runs all
    forwards first, such as schedule="gpipe". Do not pass the model what makes it compute one (labels, return_loss):
        def loss_fn(output, labels): ...               # from output.logits, output.router_logits, output.text_embeds
        pipe = Pipeline(..., loss_fn=loss_fn, reduction="batch")
        pipe.step(**inputs, target=labels)"""


class LossError(InputError):
    """The loss of the mini-batch cannot be computed from the losses of its micro-batches."""


def refusal(loss_fn: Any, reason: str) -> LossError:
    """Return the error for a loss with unknown terms. It lists what the user can write instead."""
    choices = _CHOICES_OF_OWN if loss_fn in (None, loss_of) else _CHOICES
    return LossError(f"{title(loss_fn)} cannot be split into micro-batches: {reason}.{choices}")


def title(loss_fn: Any) -> str:
    """Return the name of a loss for messages, with file and line for a function."""
    if loss_fn is None or loss_fn is loss_of:
        return "the loss that the model computes"
    if isinstance(loss_fn, nn.Module):
        return f"the loss {type(loss_fn).__name__}"
    code = getattr(loss_fn, "__code__", None)
    place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    return f"the loss {getattr(loss_fn, '__name__', repr(loss_fn))}{place}"


def check_scalar(loss: Any, what: str = "the loss") -> Tensor:
    """Return the loss, after a check that it is a scalar.

    Raises:
        LossError: it is no tensor without dimensions.
    """
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    raise LossError(
        f"{what} must be a scalar tensor, got {_kind(loss)}: sum it up with .mean() or .sum(), or return (sum, count), "
        "two scalars, for a mean over something else than samples"
    )


def check_returned(output: Any) -> Tensor:
    """Return the loss that a model has computed, after a check.

    Raises:
        LossError: the output is no tensor without dimensions.
    """
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    raise LossError(
        "no loss_fn is given, and the model returns no loss of its own: a scalar as its output, as 'loss' in a dict or "
        f"an object, or as the only scalar in a tuple. It returned {_kind(output)}. Pass loss_fn=..., or what the "
        "model computes its loss from, such as labels"
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def check_gradient(loss: Tensor, loss_fn: Any) -> None:
    """Raise an error for a loss on which ``backward()`` would raise one.

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
    """Return the tensor to call ``backward()`` on: the loss itself, or the sum of ``(sum, count)``.

    Raises:
        LossError: as :func:`check_scalar`.
    """
    return value[0] if is_pair(value) else check_scalar(value)


def value_of(value: Any) -> Tensor:
    """Return the value of a loss for the samples of its call: the loss itself, or the mean of ``(sum, count)``.

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
