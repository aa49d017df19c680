"""Rules for torch's own losses: the samples that they use, and their divisors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..capture import has_hooks
from ..capture.recorded.recording.tables import words
from .rules import LostError, Operation, Rows, broadcast
from .sums import Divisor, Part, Sum, Values
from .tape import Call, Ref
from .terms import on_host

_OVER_CLASSES = words("cross_entropy nll_loss linear_cross_entropy")
_ELEMENTWISE = words(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "kl_div poisson_nll_loss gaussian_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss"
)
_DIVIDED_BY_WEIGHTS = words("mse_loss l1_loss smooth_l1_loss huber_loss")
_CONSTANTS = ("weight", "linear_weight", "linear_bias")


@cache
def all_losses() -> frozenset[Callable[..., Any]]:
    """Return the functions of ``torch.nn.functional`` that have an argument ``reduction``."""
    functions = filter(inspect.isfunction, vars(functional).values())
    functions_here = (f for f in functions if f.__code__.co_filename == functional.__file__)
    return frozenset(f for f in functions_here if "reduction" in inspect.signature(f).parameters)


def is_torch_loss(function: Any) -> bool:
    """Return True for a function of ``torch.nn.functional`` that has an argument ``reduction``."""
    return inspect.isfunction(function) and function in all_losses()


def is_unchanged(loss_fn: Any) -> bool:
    """Return True for a function or module of torch whose call does no more than torch's own code."""
    if not isinstance(loss_fn, nn.Module):
        return is_torch_loss(loss_fn)
    module_name = nn.modules.loss.__name__
    if type(loss_fn).__module__ != module_name or type(loss_fn).forward.__module__ != module_name:
        return False
    hooked = has_hooks(loss_fn) or nn.modules.module._has_any_global_hook()
    return not (hooked or "forward" in vars(loss_fn) or loss_fn._compiled_call_impl is not None)


def result_of(operation: Operation) -> list[Rows] | Sum:
    """Return the state of the result of a call of a torch loss: a term, or the layout of its samples.

    Raises:
        LostError: it mixes samples, or its divisor is not known.
    """
    call = operation.call
    arguments = _arguments(call)
    reduction = arguments["reduction"]
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        raise LostError("is called with size_average or reduce: use reduction")
    is_mean = reduction not in ("none", "sum")
    if is_mean and call.name in _DIVIDED_BY_WEIGHTS and arguments.get("weight") is not None:
        raise LostError("divides by the sum of its weights: use reduction='none' and return (sum, count)")
    rows = _rows(operation, arguments)
    if reduction == "none":
        return [rows]
    number, gradient = call.numbers[0], operation.results[0].requires_grad
    if reduction == "sum":
        return Sum((Part(number, gradient),))
    values, summed = {name: operation.value_of(value) for name, value in arguments.items()}, None
    target = values.get("target")
    if call.name in _OVER_CLASSES and isinstance(target, Tensor) and not target.is_floating_point():
        divisor = _count_of_classes(arguments)
        # If all classes that occur have weight 0, the mean is 0/0, and smoothed labels add to the sum all the same.
        summed = None if arguments.get("weight") is None else partial(_summed, call.function, arguments)
    else:
        divisor = _count_of_losses(call, arguments, values, rows)
    return Sum((Part(number, gradient, divisor=divisor, divided=True, summed=summed),))


def _count_of_classes(arguments: dict[str, Any]) -> Divisor:
    """Return the count of a mean over classes: the weights of the targets that are not ignored."""
    target, weight, ignored = arguments["target"], arguments.get("weight"), arguments["ignore_index"]
    if not isinstance(target, Ref):
        raise LostError("takes targets that are no part of the batch")

    def counted(values: Values) -> float | Tensor:
        weights = values(weight.number) if isinstance(weight, Ref) else weight
        return count_classes(values(target.number), weights, ignored)

    operands = tuple([each.number for each in (target, weight) if isinstance(each, Ref)])
    of_all = partial(count_classes_of_all, ignore_index=ignored) if weight is None else None
    return Divisor(counted, operands, of_all=of_all)


def _count_of_losses(call: Call, arguments: dict[str, Any], values: dict[str, Any], rows: Rows) -> Divisor:
    """Return the count of a mean over all losses: how many there are, from the target alone if possible."""
    size, target = _size(call, values), arguments.get("target")
    if rows.regular:
        return Divisor(lambda _: size)
    if isinstance(target, Ref) and call.name in _ELEMENTWISE and values["target"].shape == _broadcast(values):
        return Divisor(lambda found: float(found(target.number).numel()), (target.number,))
    operands = tuple([leaf.number for leaf in call.leaves if isinstance(leaf, Ref)])
    return Divisor(lambda found: _size(call, _filled(arguments, found)), operands)


def _summed(function: Callable[..., Tensor], arguments: dict[str, Any], operands: Values) -> Tensor:
    """Compute the weighted sum over the samples instead of the mean."""
    values = _filled(arguments, operands)
    # The weights are those of one replica, and another one may be computing.
    weight = graph_cut.move(values["weight"], values["input"].device)
    return function(**{**values, "weight": weight, "reduction": "sum"})


def _filled(arguments: dict[str, Any], values: Values) -> dict[str, Any]:
    """Return arguments by name, with the tensors that they stand for."""
    return {
        name: values(value.number) if isinstance(value, Ref) else value for name, value in arguments.items()
    }


def _broadcast(values: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the tensors among some values; torch's function would import sympy, for a second."""
    return np.broadcast_shapes(*[value.shape for value in values.values() if isinstance(value, Tensor)])


def _rows(operation: Operation, arguments: dict[str, Any]) -> Rows:
    """Return where the samples of a loss that is not reduced are."""
    if operation.call.name in _ELEMENTWISE:
        dims = max(tensor.dim() for tensor, _ in operation.operands)
        rows = broadcast(operation, dims)
        if arguments["reduction"] == "batchmean" and rows.dim:
            raise LostError("divides by an extent that is not that of samples")
        return rows
    if not isinstance(arguments.get("distance_function"), nn.PairwiseDistance | None):
        raise LostError("calls a distance function that is not known to keep samples apart")
    if operation.call.name == "ctc_loss":
        return _temporal(operation, arguments)
    constants = {id(operation.value_of(arguments.get(which))) for which in _CONSTANTS}
    layouts = [(tensor, rows) for tensor, rows in operation.operands if id(tensor) not in constants]
    if any(rows for tensor, rows in operation.operands if id(tensor) in constants):
        raise LostError("takes weights that come from the batch")
    if {(rows and rows.dim, tensor.shape[:1]) for tensor, rows in layouts} != {(0, layouts[0][0].shape[:1])}:
        raise LostError("takes tensors whose rows are not those of the same samples")
    if layouts[0][0].dim() < 2:
        raise LostError("takes the samples for classes")
    return Rows(0, all(rows.regular for _, rows in operation.operands if rows))


def _temporal(operation: Operation, arguments: dict[str, Any]) -> Rows:
    """A connectionist temporal classification: its samples lie along dimension 1 of the log-probabilities."""
    for which, dim in {"log_probs": 1, "targets": 0, "input_lengths": 0, "target_lengths": 0}.items():
        tensor, rows = operation.value_of(arguments[which]), operation.state_of(arguments[which])
        # An output as the model gave it may have steps first: which dimension holds the samples shows only here.
        known = isinstance(rows, Rows) and (rows.dim == dim or which == "log_probs")
        if which == "targets" and rows == Rows(0, False) and tensor.dim() == 1:
            continue  # picked by a mask, one sample after the other
        if not known or tensor.dim() <= dim or tensor.shape[dim] != operation.samples:
            raise LostError(f"needs {which} with a row for each sample along dimension {dim}")
    return Rows(0, all(rows.regular for _, rows in operation.operands if rows))


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a function with their defaults, None for those that have none."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def _arguments(call: Call) -> dict[str, Any]:
    """Return all arguments of a call of a torch loss, by name."""
    known, (args, kwargs) = _parameters(call.function), call.arguments
    return {**known, **dict(zip(known, args, strict=False)), **kwargs}


def _size(call: Call, values: dict[str, Any]) -> float:
    """Return the number of losses that a call with ``reduction="mean"`` or ``"batchmean"`` divides by."""
    if values["reduction"] == "batchmean":
        return float(values["input"].shape[0])
    if call.name == "ctc_loss":
        return float(values["log_probs"].shape[1])
    if call.name in _ELEMENTWISE:
        return float(math.prod(_broadcast(values)))
    shapes = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), values)
    return float(call.function(**{**shapes, "reduction": "none"}).numel())


def count_classes_of_all(targets: Sequence[Tensor], ignore_index: int) -> Sequence[float | Tensor]:
    """Return the numbers of targets that are not ignored, one for each tensor."""
    sizes = list(map(Tensor.numel, targets))
    kept = torch.cat(list(map(Tensor.flatten, targets))) != ignore_index
    if not kept.is_cpu:
        return [part.count_nonzero() for part in kept.split(sizes)]
    up_to = np.append(0, np.cumsum(kept.numpy()))[[0, *accumulate(sizes)]]
    return np.diff(up_to).astype(float).tolist()


def count_classes(target: Tensor, weight: Tensor | None, ignore_index: int) -> float | Tensor:
    """Return the sum of the class weights (1 without weights) over all targets that are not ignored."""
    if weight is None and target.device.type == "cpu":
        return float(np.count_nonzero(target.numpy() != ignore_index))  # half as long as with torch
    kept_targets = target != ignore_index
    if weight is None:
        return kept_targets.count_nonzero()
    weights = weight.detach().to(target.device, torch.double)
    return on_host((weights[target.where(kept_targets, 0)] * kept_targets).sum())
