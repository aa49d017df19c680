"""Rules for torch's own losses: the samples that they use, and their divisors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from .operations import Call, LostError, Rows, elementwise, names
from .terms import Count, Replay, Term, Terms, on_host

_OVER_CLASSES = {
    function
    for name in ("cross_entropy", "nll_loss", "linear_cross_entropy")
    if (function := getattr(functional, name, None)) is not None
}
_ELEMENTWISE = names(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "kl_div poisson_nll_loss gaussian_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss"
)
_DIVIDED_BY_WEIGHTS = names("mse_loss l1_loss smooth_l1_loss huber_loss")
_CONSTANTS = ("weight", "linear_weight", "linear_bias")


@cache
def all_losses() -> frozenset[Callable[..., Any]]:
    """Return the functions of ``torch.nn.functional`` that have an argument ``reduction``."""
    functions = filter(inspect.isfunction, vars(functional).values())
    return frozenset(f for f in functions if "reduction" in inspect.signature(f).parameters)


def is_torch_loss(function: Any) -> bool:
    """Return True for a function of ``torch.nn.functional`` that has an argument ``reduction``."""
    return isinstance(function, Callable) and inspect.isfunction(function) and function in all_losses()


def result_of(
    call: Call, in_proportion: Callable[[float], Replay], samples: int, trusted: bool
) -> Rows | Terms:
    """Return the state of the result of a call of a torch loss: a term, or the layout of its samples.

    Args:
        call: its result may be replaced by another one of the same value.
        in_proportion: gives what computes a number that is in proportion to the samples, for any micro-batch.
        samples: in the micro-batch.
        trusted: whether its tensors are the output and the target as they are.

    Raises:
        LostError: it mixes samples, or its divisor is not known. It has not run then.
    """
    function, name = call.function, call.name
    given = arguments(function, call.args, call.kwargs)
    if given.get("size_average") is not None or given.get("reduce") is not None:
        raise LostError("is called with size_average or reduce: use reduction")
    mean = given["reduction"] in ("mean", "batchmean")
    if mean and name in _DIVIDED_BY_WEIGHTS and given.get("weight") is not None:
        raise LostError("divides by the sum of its weights: use reduction='none' and return (sum, count)")
    rows = next(rows for _, rows in call.operands if rows) if trusted else _rows(call, given, samples)
    if given["reduction"] == "none":
        return rows
    if not mean:
        return Terms((Term(call.result),))
    number, by_class = divisor(function, given), counts_classes(function, given)
    target, replay = call.replay_of(given.get("target")), None
    if target is not None and by_class:
        rest = {name: given.get(name) for name in ("weight", "ignore_index", "reduction")}
        replay = lambda *step: divisor(function, {**rest, "target": target(*step)})  # noqa: E731
    elif rows.regular and not by_class:
        replay = in_proportion(float(number))
    elif target is not None and given["target"].numel() == number:
        replay = lambda *step: float(target(*step).numel())  # noqa: E731
    count = Count(number, replay, rows.regular and not by_class)
    if by_class and given.get("weight") is not None and (isinstance(number, Tensor) or not number):
        # Where all classes that occur have weight 0, the mean is 0/0, and smoothed labels add to the sum all the same.
        total = function(**{**given, "reduction": "sum"})
        call.result = total / number
        return Terms((Term(total, divisor=count),))
    return Terms((Term(call.result, divisor=count, divided=True),))


def _rows(call: Call, given: dict[str, Any], samples: int) -> Rows:
    """Return where the samples of a loss that is not reduced are."""
    if call.name in _ELEMENTWISE:
        rows = elementwise(call)
        if given["reduction"] == "batchmean" and rows.dim:
            raise LostError("divides by an extent that is not that of samples")
        return rows
    if not isinstance(given.get("distance_function"), nn.PairwiseDistance | None):
        raise LostError("calls a distance function that is not known to keep samples apart")
    if call.name == "ctc_loss":
        return _temporal(call, given, samples)
    constants = {id(given.get(which)) for which in _CONSTANTS}
    found = [(tensor, rows) for tensor, rows in call.operands if id(tensor) not in constants]
    if any(rows for tensor, rows in call.operands if id(tensor) in constants):
        raise LostError("takes weights that come from the batch")
    if {(rows and rows.dim, tensor.shape[:1]) for tensor, rows in found} != {(0, found[0][0].shape[:1])}:
        raise LostError("takes tensors whose rows are not those of the same samples")
    if found[0][0].dim() < 2:
        raise LostError("takes the samples for classes")
    return Rows(0, all(rows is not None and rows.regular for _, rows in found))


def _temporal(call: Call, given: dict[str, Any], samples: int) -> Rows:
    """A connectionist temporal classification: its samples lie along dimension 1 of the log-probabilities."""
    for which, dim in {"log_probs": 1, "targets": 0, "input_lengths": 0, "target_lengths": 0}.items():
        rows = next((rows for tensor, rows in call.operands if tensor is given[which]), None)
        # An output as the model gave it may have steps first: which dimension holds the samples shows only here.
        known = rows is not None and (rows.dim == dim or which == "log_probs")
        if which == "targets" and rows == Rows(0, False) and given[which].dim() == 1:
            continue  # picked by a mask, one sample after the other
        if not known or given[which].dim() <= dim or given[which].shape[dim] != samples:
            raise LostError(f"needs {which} with a row for each sample along dimension {dim}")
    return Rows(0, all(rows.regular for _, rows in call.operands if rows))


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a function with their defaults, None for those that have none."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of a torch loss, by name."""
    known = _parameters(function)
    return {**known, **dict(zip(known, args, strict=False)), **kwargs}


def counts_classes(function: Callable[..., Any], given: dict[str, Any]) -> bool:
    """Return True if the loss divides by the class targets that are not ignored, so that their values matter."""
    target = given.get("target")
    return function in _OVER_CLASSES and isinstance(target, Tensor) and not target.is_floating_point()


def divisor(function: Callable[..., Any], given: dict[str, Any]) -> float | Tensor:
    """Return the divisor of a torch loss with ``reduction="mean"`` or ``"batchmean"``.

    Args:
        function: one of torch's losses.
        given: its arguments by name. Of class targets the values count, of all else the shapes.

    Returns:
        A number, or a tensor without dimensions on the target's device, which is not waited for.
    """
    if counts_classes(function, given):
        return count_classes(given["target"], given.get("weight"), given["ignore_index"])
    if given["reduction"] == "batchmean":
        return float(given["input"].shape[0])
    if function is functional.ctc_loss:
        return float(given["log_probs"].shape[1] if given["log_probs"].dim() == 3 else 1)
    if function.__name__ in _ELEMENTWISE:
        shapes = [value.shape for value in given.values() if isinstance(value, Tensor)]
        return float(math.prod(np.broadcast_shapes(*shapes)))  # torch's would import sympy, for a second
    shapes = pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), given)
    return float(function(**{**shapes, "reduction": "none"}).numel())


def count_classes(target: Tensor, weight: Tensor | None, ignore_index: int) -> float | Tensor:
    """Return the sum of the class weights (1 without weights) over all targets that are not ignored."""
    target = target.detach()
    kept = target != ignore_index
    if weight is None:
        return on_host(kept.sum())
    weights = weight.detach().to(target.device, torch.double)
    return on_host((weights[target.where(kept, 0)] * kept).sum())
