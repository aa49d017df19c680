"""What a mean of torch's own divides by: elements, samples, or the class targets that are not ignored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .reduction import stated_options, unbound

REDUCING = frozenset(
    function
    for function in vars(functional).values()
    if inspect.isfunction(function) and "reduction" in inspect.signature(function).parameters
)

_OVER_CLASSES = {
    function
    for name in ("cross_entropy", "nll_loss", "linear_cross_entropy")
    if (function := getattr(functional, name, None)) is not None
}
_MODULES_OVER_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)


class Divisor(NamedTuple):
    """What a mean divides by.

    Attributes:
        number: the number.
        sum_may_stay: whether the sum need not be zero where the number is.
    """

    number: float
    sum_may_stay: bool = False


@cache
def _defaults(function: Callable[..., Tensor]) -> dict[str, Any]:
    """The parameters of a function, with ``None`` where they have no default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def arguments(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """All arguments of a call of one of torch's losses by name, with those that it was not given."""
    known = _defaults(function)
    return {**known, **dict(zip(known, args, strict=False)), **kwargs}


def is_over_classes(function: Callable[..., Tensor], given: dict[str, Any]) -> bool:
    """Whether a loss counts class targets, so that what it divides by depends on their values."""
    target = given.get("target")
    return function in _OVER_CLASSES and isinstance(target, Tensor) and not target.is_floating_point()


def ignored_index(given: dict[str, Any]) -> int:
    """The class target that does not count."""
    return -100 if given["ignore_index"] is None else given["ignore_index"]


def divisor(function: Callable[..., Tensor], given: dict[str, Any]) -> Divisor:
    """What one of torch's losses divides by when it is called with ``reduction="mean"``.

    Args:
        function: one of ``REDUCING``.
        given: all its arguments, by name; of a class target the values are read, of all other tensors the shapes.
    """
    if is_over_classes(function, given):
        smoothed = given.get("label_smoothing", 0.0) > 0 and given["weight"] is not None
        return Divisor(count_targets(given["target"], given["weight"], ignored_index(given)), smoothed)
    if given["reduction"] == "batchmean":
        return Divisor(float(given["input"].shape[0]))
    if function is functional.ctc_loss:
        return Divisor(float(_sequences(given["log_probs"], given["targets"], given["target_lengths"])))
    apart = function(**{**given, "reduction": "none"})
    return Divisor(float(apart.numel()))


def count_targets(target: Tensor, weight: Tensor | None, ignore_index: int) -> float:
    """The class targets that are not ignored, each with the weight of its class."""
    if weight is None:
        return float(torch.count_nonzero(target != ignore_index))
    counted = target[target != ignore_index]
    return float(weight.to(counted.device)[counted].sum(dtype=torch.double))


def count_targets_of(loss_fn: Any, target: Any) -> float | None:
    """What a loss of torch's own divides by for this target; None for a mean over all samples.

    Only for a loss that :func:`weighs_as_a_whole`.
    """
    options = stated_options(loss_fn)
    if not _is_over_classes(loss_fn) or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    return count_targets(target, options.get("weight"), options["ignore_index"])


def weighs_as_a_whole(loss_fn: Any) -> bool:
    """Whether a loss is one of torch's own, whose value for a micro-batch need only be weighed.

    Not so where classes of weight zero still add to a sum, as with smoothed labels, or where arguments are not
    those that a pipeline gives.
    """
    if isinstance(loss_fn, nn.Module):
        kind = next((k for k in type(loss_fn).__mro__ if k.__module__ == "torch.nn.modules.loss"), None)
        known = kind is not None and type(loss_fn).forward is kind.forward and hasattr(loss_fn, "reduction")
    else:
        known = unbound(loss_fn)[0] in REDUCING
    if not known or not _is_over_classes(loss_fn):
        return known
    options = stated_options(loss_fn)
    return options.get("weight") is None or not getattr(
        loss_fn, "label_smoothing", options.get("label_smoothing")
    )


def _is_over_classes(loss_fn: Any) -> bool:
    if isinstance(loss_fn, nn.Module):
        return isinstance(loss_fn, _MODULES_OVER_CLASSES)
    return unbound(loss_fn)[0] in (functional.cross_entropy, functional.nll_loss)


def _sequences(log_probs: Tensor, targets: Tensor, lengths: Any) -> int:
    """The sequences of a connectionist temporal classification, which lie along dimension 1."""
    if log_probs.dim() == 2:
        return 1
    sequences = log_probs.shape[1]
    if sequences != len(lengths) or (targets.dim() == 2 and targets.shape[0] != sequences):
        raise ValueError(f"outputs of {sequences} sequences and targets of {len(lengths)}")
    return sequences
