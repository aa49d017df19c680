"""Finds out whether a loss that does not say so is a mean or a sum over samples, by trying it on parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .counting import count
from .reduction import Reduction, title

LossFunction = Callable[..., Tensor]


def observe(
    loss_fn: LossFunction, output: Any, target: Any, samples: int, loss: Tensor | None = None
) -> Reduction | None:
    """Compares the loss of one micro-batch with the losses of its two halves.

    Args:
        loss_fn: the loss.
        output, target: of one micro-batch.
        samples: how many there are in it.
        loss: what the loss gave for it, where that is known.

    Returns:
        The reduction; None where these values cannot tell, being zero or not finite.

    Raises:
        ValueError: it behaves neither like a mean nor like a sum over samples.
        Exception: what the loss raises on a half of the samples.
    """
    with torch.no_grad():
        output, target = (_map(Tensor.detach, nest) for nest in (output, target))
        found = _compare(loss_fn, output, target, samples, loss)
        return found or _compare(loss_fn, _map(_shaken, output), target, samples)


def _compare(
    loss_fn: LossFunction, output: Any, target: Any, samples: int, loss: Tensor | None = None
) -> Reduction | None:
    if samples < 2:  # nothing to halve: take the one sample twice
        output, target = (
            _map(lambda t: torch.cat([t, t]) if t.dim() else t, nest) for nest in (output, target)
        )
        samples *= 2
        loss = None
    middle = samples // 2
    halves = [
        (_part(output, samples, a, b), _part(target, samples, a, b))
        for a, b in ((0, middle), (middle, samples))
    ]
    whole = _value(loss_fn, output, target) if loss is None else float(loss)
    first, second = (_value(loss_fn, *half) for half in halves)
    scale = max(abs(whole), abs(first), abs(second))
    if not math.isfinite(scale) or scale == 0:
        return None
    share = _share(loss_fn, halves, middle / samples)
    near = scale * _tolerance(output)
    mean = abs(whole - (share * first + (1 - share) * second)) <= near
    total = abs(whole - (first + second)) <= near
    if mean and total:
        return None
    if mean or total:
        return Reduction.MEAN if mean else Reduction.SUM
    raise ValueError(
        f"the loss {title(loss_fn)} is neither a mean nor a sum over samples: it is {whole:.6g} for {samples} samples, "
        f"{first:.6g} and {second:.6g} for their two halves, so the losses of micro-batches do not add up to that of "
        "the mini-batch. Use a loss of torch, as in loss_fn=nn.CrossEntropyLoss(ignore_index=-100), or write it as a "
        "mean or a sum over samples, as in loss_fn=lambda output, target: ((output - target) ** 2).mean()"
    )


def _share(loss_fn: LossFunction, halves: Sequence[tuple[Any, Any]], by_samples: float) -> float:
    """The part of a mean that the first half makes up."""
    before, behind = (count(loss_fn, *half) for half in halves)
    if before is None or behind is None or not before + behind:
        return by_samples
    return before / (before + behind)


def _value(loss_fn: LossFunction, output: Any, target: Any) -> float:
    return float(loss_fn(output) if target is None else loss_fn(output, target))


def _part(nest: Any, samples: int, start: int, stop: int) -> Any:
    """Some of the samples; a layer may have folded more dimensions into the first."""

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] % samples:
            return tensor
        rows = tensor.shape[0] // samples
        return tensor[start * rows : stop * rows]

    return _map(part, nest)


def _shaken(tensor: Tensor) -> Tensor:
    """Other values of the same kind, for when the real ones give nothing to compare."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(0)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device=tensor.device)
    return torch.nan_to_num(tensor) + noise.to(tensor.dtype)


def _tolerance(output: Any) -> float:
    tensors = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    return 5e-2 if half or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") else 1e-3


def _map(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, function, nest)
