"""Finds out how a loss sums up its samples by trying it on the two halves of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import bindings_restored
from .calls import Diverged
from .scalar import check_scalar
from .survey import survey
from .terms import part
from .valueless import shaped

LossFunction = Callable[..., Any]


class Rule(StrEnum):
    """How the losses of micro-batches make up that of the mini-batch."""

    TERMS = "sum of known means and sums"
    MEAN = "mean"
    SUM = "sum"


class Halves:
    """A loss of one micro-batch, and of the two halves of its samples.

    Args:
        loss_fn: the loss.
        output, target: of the micro-batch.
        samples: how many there are in it.
        dimension: of the output, along which they lie.
    """

    def __init__(
        self, loss_fn: LossFunction, output: Any, target: Any, samples: int, dimension: int = 0
    ) -> None:
        self._loss_fn = loss_fn
        self._dimension = dimension
        output, target = (_map(Tensor.detach, nest) for nest in (output, target))
        if samples < 2:  # nothing to halve: take the one sample twice
            output, target = _twice(output, dimension), _twice(target, 0)
            samples *= 2
        self.output, self.target, self.samples = output, target, samples
        self.values: tuple[float, float, float] = (math.nan, math.nan, math.nan)

    def rule(self, terms: bool) -> Rule | None:
        """How the loss sums up; None where these values cannot tell, being zero or not finite.

        Args:
            terms: whether it may be a sum of the means and sums that are seen in it.

        Raises:
            LookupError: none of all.
            Exception: what the loss raises on a half of the samples.
        """
        with torch.no_grad():
            found = self._compare(terms)
            if found is None:
                self.output = _map(_shaken, self.output)
                try:
                    found = self._compare(terms)
                except RuntimeError:  # values that the loss does not take
                    return None
            return found

    def _compare(self, terms: bool) -> Rule | None:
        middle = self.samples // 2
        halves = [self._half(0, middle), self._half(middle, self.samples)]
        whole = self._value(self.output, self.target)
        parts = self._parts(halves) if terms else None
        if parts is not None:
            scale = max(abs(whole), *map(abs, parts))
            if not math.isfinite(scale):
                return None
            if abs(whole - sum(parts)) <= scale * _tolerance(self.output):
                return Rule.TERMS if scale else None
        first, second = (self._value(*half) for half in halves)
        self.values = whole, first, second
        scale = max(abs(whole), abs(first), abs(second))
        if not math.isfinite(scale) or scale == 0:
            return None
        share = middle / self.samples
        near = scale * _tolerance(self.output)
        mean = abs(whole - (share * first + (1 - share) * second)) <= near
        total = abs(whole - (first + second)) <= near
        if mean and total:
            return None
        if not mean and not total:
            raise LookupError
        return Rule.MEAN if mean else Rule.SUM

    def _parts(self, halves: list[tuple[Any, Any]]) -> list[float] | None:
        """What each half has in the whole, if the whole is a sum of known means and sums."""
        shape = partial(shaped, samples=self.samples, dimension=self._dimension)
        whole = survey(self._loss_fn, shape(self.output, wanted=self.samples), self.target, self.samples)
        found = []
        for output, target in halves:
            size = self.samples // 2 if not found else self.samples - self.samples // 2
            own = survey(self._loss_fn, shape(self.output, wanted=size), target, size, whole)
            if not own.agrees_with(whole):
                return None
            try:
                loss, weight, _ = part(partial(_call, self._loss_fn, target), output, own, whole, 2)
            except Diverged:
                return None
            found.append(float(loss) * weight if weight else 0.0)
        return found

    def _half(self, start: int, stop: int) -> tuple[Any, Any]:
        def take(nest: Any, dimension: int) -> Any:
            return _map(lambda t: _rows(t, self.samples, start, stop, dimension), nest)

        return take(self.output, self._dimension), take(self.target, 0)

    def _value(self, output: Any, target: Any) -> float:
        return float(check_scalar(_call(self._loss_fn, target, output)))


def _call(loss_fn: LossFunction, target: Any, output: Any) -> Any:
    """The loss, which keeps nothing of having been tried."""
    with bindings_restored(loss_fn) if isinstance(loss_fn, nn.Module) else nullcontext():
        return loss_fn(output) if target is None else loss_fn(output, target)


def _rows(tensor: Tensor, samples: int, start: int, stop: int, dimension: int) -> Tensor:
    """Some of the samples; a layer may have folded more dimensions into theirs."""
    if tensor.dim() <= dimension or tensor.shape[dimension] % samples:
        return tensor
    rows = tensor.shape[dimension] // samples
    return tensor.narrow(dimension, start * rows, (stop - start) * rows)


def _twice(nest: Any, dimension: int) -> Any:
    return _map(lambda t: torch.cat([t, t], dimension) if t.dim() > dimension else t, nest)


def _shaken(tensor: Tensor) -> Tensor:
    """Other values of the same kind, for when the real ones give nothing to compare."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(0)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device=tensor.device)
    return torch.nan_to_num(tensor) + noise.to(tensor.dtype)


def _tolerance(output: Any) -> float:
    kinds = {leaf.dtype for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)}
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return 5e-2
    if kinds & {torch.float16, torch.bfloat16}:
        return 5e-2
    return 1e-3 if torch.float32 in kinds else 1e-8


def _map(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, function, nest)
