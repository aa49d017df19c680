"""How a loss sums up its samples, as far as it says so itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class Reduction(StrEnum):
    """How a loss sums up its samples."""

    MEAN = "mean"
    SUM = "sum"


def declared_reduction(loss_fn: Callable[..., Tensor] | None) -> Reduction | None:
    """The reduction that a loss states: an attribute or argument ``reduction``; None where it states none.

    Raises:
        ValueError: it states that it does not reduce, or something else than a mean or a sum.
    """
    options = stated_options(loss_fn)
    if "reduction" not in options:
        return None
    try:
        return Reduction("mean" if options["reduction"] == "batchmean" else options["reduction"])
    except ValueError:
        raise ValueError(
            f"the loss {title(loss_fn)} has reduction={options['reduction']!r}, which gives no scalar: "
            "use reduction='mean' or 'sum'"
        ) from None


def stated_options(loss_fn: Any) -> dict[str, Any]:
    """What a loss module was built with, or a function of torch was bound to."""
    if isinstance(loss_fn, nn.Module):
        names = ("reduction", "weight", "ignore_index")
        return {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
    function, bound = unbound(loss_fn)
    if function is None or getattr(functional, getattr(function, "__name__", ""), None) is not function:
        return {"reduction": bound["reduction"]} if "reduction" in bound else {}
    return {**_defaults(function), **bound}


@cache
def _defaults(function: Callable[..., Tensor]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def unbound(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """The function behind ``functools.partial``, and the keyword arguments bound to it."""
    bound: dict[str, Any] = {}
    while isinstance(loss_fn, partial):
        bound = {**loss_fn.keywords, **bound}
        loss_fn = loss_fn.func
    return loss_fn, bound


def title(loss_fn: Any) -> str:
    """What to call a loss in a message."""
    if isinstance(loss_fn, nn.Module):
        return type(loss_fn).__name__
    return getattr(loss_fn, "__name__", repr(loss_fn))
