"""How much each micro-batch's loss weighs in the loss of its mini-batch.

A sum over samples is the sum of the micro-batches' sums: every weight is 1. A mean over samples is the mean of their
means weighted by how much each of them was the mean of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree


class Reduction(StrEnum):
    """How a loss sums up its samples."""

    MEAN = "mean"
    SUM = "sum"


class LossWeights:
    """The weights of the micro-batches of one mini-batch.

    Args:
        loss_fn: the loss; None where the model computes it.
        sizes: samples in each micro-batch.
        targets: their targets.
        reduction: how the loss sums up; None to find out, once, from the first micro-batch's output.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Tensor] | None,
        sizes: Sequence[int],
        targets: Sequence[Any],
        reduction: Reduction | None,
    ) -> None:
        self.reduction = reduction
        self._loss_fn = loss_fn
        self._targets = targets
        self._shares = _shares(loss_fn, sizes, targets)

    def of(self, micro_batch: int, output: Any, loss: Tensor) -> float:
        """The weight of a micro-batch, whose ``output`` and ``loss`` are at hand."""
        if self.reduction is None:
            self.reduction = _observe(self._loss_fn, output, self._targets[micro_batch], loss)
        return 1.0 if self.reduction is Reduction.SUM else self._shares[micro_batch]


def declared_reduction(loss_fn: Callable[..., Tensor] | None) -> Reduction | None:
    """The reduction that a loss states: an attribute or argument ``reduction``; None where it states none.

    Raises:
        ValueError: it states that it does not reduce, or something else than a mean or a sum.
    """
    options = _options(loss_fn)
    if "reduction" not in options:
        return None
    try:
        return Reduction("mean" if options["reduction"] == "batchmean" else options["reduction"])
    except ValueError:
        raise ValueError(
            f"the loss {_title(loss_fn)} has reduction={options['reduction']!r}, which gives no scalar: "
            "use reduction='mean' or 'sum'"
        ) from None


def check_scalar(loss: Any, what: str = "the loss") -> Tensor:
    """The loss.

    Raises:
        ValueError: it is no tensor with one element.
    """
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise ValueError(f"{what} must be a scalar tensor, got {got}: sum it up with .mean() or .sum()")


_COUNTED = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
}


def _options(loss_fn: Any) -> dict[str, Any]:
    """What a loss of torch was built with, or the function of torch was bound to."""
    if isinstance(loss_fn, nn.Module):
        return {
            name: getattr(loss_fn, name)
            for name in ("reduction", "weight", "ignore_index")
            if hasattr(loss_fn, name)
        }
    bound: dict[str, Any] = {}
    while isinstance(loss_fn, partial):
        bound = {**loss_fn.keywords, **bound}
        loss_fn = loss_fn.func
    if getattr(functional, getattr(loss_fn, "__name__", ""), None) is not loss_fn or loss_fn is None:
        return {name: bound[name] for name in ("reduction",) if name in bound}
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(loss_fn).parameters.items()
        if parameter.default is not parameter.empty
    }
    return {**defaults, **bound}


def _shares(loss_fn: Any, sizes: Sequence[int], targets: Sequence[Any]) -> list[float]:
    """What part of a mean each micro-batch makes up."""
    counts: Sequence[float] = sizes
    if _counts_targets(loss_fn) and all(_holds_classes(target) for target in targets):
        options = _options(loss_fn)
        counts = [_class_count(target, options.get("weight"), options["ignore_index"]) for target in targets]
    total = sum(counts)
    return [count / total if total else 1 / len(counts) for count in counts]


def _counts_targets(loss_fn: Any) -> bool:
    """Whether the mean is over those targets that are not ignored, each with its class's weight."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    return loss_fn in _COUNTED.values() or type(loss_fn) in _COUNTED


def _holds_classes(target: Any) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point()


def _class_count(target: Tensor, weight: Tensor | None, ignore_index: int) -> float:
    counted = target[target != ignore_index]
    return float(counted.numel() if weight is None else weight.to(target.device)[counted].sum())


def _observe(loss_fn: Callable[..., Tensor] | None, output: Any, target: Any, loss: Tensor) -> Reduction:
    """Finds the reduction of a loss that states none: compares the loss of some samples with that of their parts.

    Raises:
        ValueError: it behaves neither like a mean nor like a sum over samples.
    """
    if loss_fn is None:
        return Reduction.MEAN
    with torch.no_grad():
        output, target = (pytree.tree_map_only(Tensor, Tensor.detach, nest) for nest in (output, target))
        samples = pytree.tree_leaves(output)[0].shape[0]
        if samples < 2:
            parts, weights = [(output, target)] * 2, [0.5, 0.5]
            whole = _evaluate(
                loss_fn, *(_map(lambda t: torch.cat([t, t]), nest) for nest in (output, target))
            )
        else:
            middle = samples // 2
            parts = [
                tuple(_map(lambda t, place=place: t[place], nest) for nest in (output, target))
                for place in (slice(middle), slice(middle, None))
            ]
            weights = [middle / samples, 1 - middle / samples]
            whole = loss.detach()
        values = [_evaluate(loss_fn, *part) for part in parts]
    if torch.allclose(whole, values[0] * weights[0] + values[1] * weights[1], rtol=1e-3):
        return Reduction.MEAN
    if torch.allclose(whole, values[0] + values[1], rtol=1e-3):
        return Reduction.SUM
    raise ValueError(
        f"the loss {_title(loss_fn)} is neither a mean nor a sum over samples: it is {float(whole):.6g} for some "
        f"samples and {float(values[0]):.6g} and {float(values[1]):.6g} for their two parts, so that micro-batches "
        "cannot be put together to the loss of the mini-batch. Write it as a mean or a sum over samples"
    )


def _evaluate(loss_fn: Callable[..., Tensor], output: Any, target: Any) -> Tensor:
    return loss_fn(output) if target is None else loss_fn(output, target)


def _map(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, function, nest)


def _title(loss_fn: Any) -> str:
    return (
        type(loss_fn).__name__
        if isinstance(loss_fn, nn.Module)
        else getattr(loss_fn, "__name__", repr(loss_fn))
    )
