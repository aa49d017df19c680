"""What a mean over class targets is a mean of: the targets that are not ignored, each with its class's weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .reduction import stated_options, unbound

_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)


def count(loss_fn: Callable[..., Tensor], output: Any, target: Any) -> float | None:
    """What the mean of a loss divides by for this target; None where it is not a mean over class targets.

    A loss of torch says so itself. Any other function is called on an output of no values, and its calls of
    torch's ``cross_entropy`` and ``nll_loss`` are seen; where there is not exactly one, nothing is known.

    Args:
        loss_fn: the loss.
        output: of one micro-batch; only its shapes are looked at.
        target: of that micro-batch.
    """
    if _is_counted(loss_fn):
        options = stated_options(loss_fn)
        return _count(target, options.get("weight"), options["ignore_index"])
    if isinstance(loss_fn, nn.modules.loss._Loss) or target is None:
        return None
    without_values = pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), output)
    watch = _Watch()
    try:
        with torch.no_grad(), watch:
            loss_fn(without_values, target)
    except Exception:
        pass  # it needs values: what was seen before counts
    return watch.counts[0] if len(watch.counts) == 1 else None


def _is_counted(loss_fn: Any) -> bool:
    if isinstance(loss_fn, nn.Module):
        return any(isinstance(loss_fn, kind) and type(loss_fn).forward is kind.forward for kind in _MODULES)
    return unbound(loss_fn)[0] in _FUNCTIONS


def _count(target: Any, weight: Tensor | None, ignore_index: int) -> float | None:
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    counted = target[target != ignore_index]
    return float(counted.numel() if weight is None else weight.to(target.device)[counted].sum())


class _Watch(TorchFunctionMode):
    """Sees the calls of the two functions, and answers them without computing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[float | None] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _FUNCTIONS:
            return func(*args, **(kwargs or {}))
        call = inspect.signature(func).bind(*args, **(kwargs or {}))
        call.apply_defaults()
        given = call.arguments
        if given["reduction"] == "mean":
            self.counts.append(_count(given["target"], given["weight"], given["ignore_index"]))
        return torch.zeros((), device="meta")
