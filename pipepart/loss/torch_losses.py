"""Torch's own losses: which samples they take, and what they divide by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from .operations import Call, LostError, Place, major, names, pointwise
from .sums import Sum
from .terms import Count, Predict, Term, on_host

_OVER_CLASSES = {
    function
    for name in ("cross_entropy", "nll_loss", "linear_cross_entropy")
    if (function := getattr(functional, name, None)) is not None
}


_ELEMENTWISE = names(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "kl_div poisson_nll_loss gaussian_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss"
)
_DIVIDED_BY_WEIGHTS = frozenset(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
_CONSTANTS = ("weight", "linear_weight", "linear_bias")


@cache
def all_losses() -> frozenset[Callable[..., Any]]:
    """The functions of ``torch.nn.functional`` that take a reduction."""
    functions = filter(inspect.isfunction, vars(functional).values())
    return frozenset(f for f in functions if "reduction" in inspect.signature(f).parameters)


def is_one(function: Any) -> bool:
    """Return True for a function of ``torch.nn.functional`` that takes a reduction."""
    return isinstance(function, Callable) and inspect.isfunction(function) and function in all_losses()


def called(
    call: Call, key: Hashable, trusted: bool, replay_of: Callable[[Any], Predict | None]
) -> tuple[Tensor, Any]:
    """Runs a call of one of torch's losses; returns its value, and the sum that it is or where its samples are.

    Args:
        call: which has no result yet.
        key: names its value.
        trusted: whether its tensors are the output and the target as they are.
        replay_of: makes a tensor from another target, by its key; None where it does not come from the target alone.

    Raises:
        LostError: it mixes samples, or its divisor is not known. It has not run then.
    """
    function, name = call.function, call.name
    given = arguments(function, call.args, call.kwargs)
    mean = given["reduction"] in ("mean", "batchmean")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        raise LostError("is called with size_average or reduce: use reduction")
    if mean and name in _DIVIDED_BY_WEIGHTS and given.get("weight") is not None:
        raise LostError("divides by the sum of its weights: use reduction='none' and return (sum, count)")
    place = Place(0, "trusted") if trusted else _place(call, given)
    if given["reduction"] == "none":
        return function(*call.args, **call.kwargs), place
    if not mean:
        result = function(*call.args, **call.kwargs)
        return result, Sum((Term(result),), key)
    by_class = counts_classes(function, given)
    number = divisor(function, given)
    replay = next(
        (
            replay_of(k)
            for (t, _), k in zip(call.operands, call.keys, strict=True)
            if t is given.get("target")
        ),
        None,
    )
    predict: Predict | None = None
    if replay is not None and by_class:
        rest = {name: given.get(name) for name in ("weight", "ignore_index", "reduction")}
        predict = lambda target: divisor(function, {**rest, "target": replay(target)})  # noqa: E731
    elif replay is not None and given["target"].numel() == number:
        predict = lambda target: float(replay(target).numel())  # type: ignore[union-attr]  # noqa: E731
    masked = isinstance(place.order, tuple) and place.order[0] == "masked"
    count = Count(number, predict=predict, steady=not by_class and not masked)
    if by_class and given.get("weight") is not None and (isinstance(number, Tensor) or not number):
        # Where all classes that occur have weight 0, the mean is 0/0, and smoothed labels add to the sum all the same.
        total = function(**{**given, "reduction": "sum"})
        return total / number, Sum((Term(total, divisor=count),), key)
    result = function(*call.args, **call.kwargs)
    return result, Sum((Term(result, divisor=count, divided=True),), key)


def _place(call: Call, given: dict[str, Any]) -> Place:
    """Where the samples of a loss that is not reduced are."""
    name = call.name
    if name in _ELEMENTWISE:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor, _ in call.operands))
        place = pointwise(call._replace(result=torch.empty(shape, device="meta")))
        if given["reduction"] == "batchmean" and place.dim:
            raise LostError("divides by an extent that is not that of samples")
        return place
    if not isinstance(given.get("distance_function"), nn.PairwiseDistance | None):
        raise LostError("calls a distance function that is not known to keep samples apart")
    if name == "ctc_loss":
        return _temporal(call, given)
    constants = [given.get(which) for which in _CONSTANTS]
    rows = [(t, place) for t, place in call.operands if not any(t is constant for constant in constants)]
    places = {place for _, place in rows}
    place = places.pop()
    if (
        place is None
        or places
        or place.dim
        or any(p for t, p in call.operands if any(t is c for c in constants))
    ):
        raise LostError("takes tensors whose rows are not those of the same samples")
    if rows[0][0].dim() < 2:
        raise LostError("takes the samples for classes")
    return place


def _temporal(call: Call, given: dict[str, Any]) -> Place:
    """A connectionist temporal classification: its samples lie along dimension 1 of the log-probabilities."""
    wanted = {"log_probs": 1, "targets": 0, "input_lengths": 0, "target_lengths": 0}
    for which, dim in wanted.items():
        place = next((place for tensor, place in call.operands if tensor is given[which]), None)
        if which == "log_probs" and place == Place(0, major(given[which].shape[0])):
            place = Place(1, major(given[which].shape[1]))  # an output as the model gave it
        if place is None or place.dim != dim or place.order != major(call.samples):
            raise LostError(f"needs {which} with a row for each sample along dimension {dim}")
    return Place(0, major(call.samples))


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a function with their defaults, None for those that have none."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of one of torch's losses, by name."""
    known = _parameters(function)
    return {**known, **dict(zip(known, args, strict=False)), **kwargs}


def counts_classes(function: Callable[..., Any], given: dict[str, Any]) -> bool:
    """Return True if the loss divides by the class targets that are not ignored, so that their values matter."""
    target = given.get("target")
    return function in _OVER_CLASSES and isinstance(target, Tensor) and not target.is_floating_point()


def divisor(function: Callable[..., Any], given: dict[str, Any]) -> float | Tensor:
    """What one of torch's losses divides by when it is called with ``reduction="mean"`` or ``"batchmean"``.

    Args:
        function: one of :func:`pipepart.loss.reduction.torch_losses`.
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
        return float(torch.broadcast_shapes(*shapes).numel())
    shapes = pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), given)
    return float(function(**{**shapes, "reduction": "none"}).numel())


def count_classes(target: Tensor, weight: Tensor | None, ignore_index: int) -> float | Tensor:
    """The class targets that are not ignored, each with the weight of its class."""
    target = target.detach()
    kept = target != ignore_index
    if weight is None:
        return on_host(kept.sum())
    weights = weight.detach().to(target.device, torch.double)
    return on_host((weights[target.where(kept, 0)] * kept).sum())
