"""Sums of terms, as a loss computes them from means and sums over samples: added, scaled, and divided by counts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..capture.recorded.recording.tables import words
from .rules import LostError, Operation
from .tape import Ref
from .terms import on_host

Values = Callable[[int], Tensor]  # returns a tensor of a micro-batch by its number

DIVISIONS = words("div divide true_divide __truediv__")
_NOT_ALONE = "takes the number of samples: divide a sum over samples by it alone"
_PRODUCTS = words("mul multiply __rmul__")
_NOT_PLAIN = "multiplies or divides by a sum over samples, or adds a number to one and divides by it"
_CONVERSIONS = words(
    "to float double half bfloat16 long int type cpu cuda clone contiguous squeeze view reshape detach sum mean"
)


class Divisor(NamedTuple):
    """What a term is divided by: the sum of the counts of all micro-batches.

    Attributes:
        part: computes the count of a micro-batch from its tensors.
        operands: the numbers of the tensors that it is computed from; none if it is in proportion to the samples.
        least: what the loss divides by if the sum of the counts is smaller, as in ``count.clamp(min=1)``.
    """

    part: Callable[[Values], float | Tensor]
    operands: tuple[int, ...] = ()
    least: float = -math.inf


class Part(NamedTuple):
    """A mean or a sum over the samples of a micro-batch, as a term of its loss.

    Attributes:
        number: of its tensor.
        gradient: whether it has a gradient; False for one that was detached later.
        coefficient: the number that it is multiplied by.
        divisor: None for a sum.
        divided: whether the tensor has been divided by the count of its micro-batch.
        summed: computes the sum instead of the mean, for use if the count is 0.
    """

    number: int
    gradient: bool
    coefficient: float | Tensor = 1.0
    divisor: Divisor | None = None
    divided: bool = False
    summed: Callable[[Values], Tensor] | None = None


class Sum(NamedTuple):
    """A sum of parts plus a number ``shift``, which is added once per mini-batch."""

    parts: tuple[Part, ...]
    shift: float | Tensor = 0.0

    def plus(self, other: Sum) -> Sum:
        """Return the sum of both."""
        return Sum((*self.parts, *other.parts), self.shift + other.shift)

    def scaled(self, scale: Callable[[Any], Any]) -> Sum:
        """Apply ``scale``, which multiplies or divides by a constant, to all parts and to the shift."""
        parts = tuple(part._replace(coefficient=scale(part.coefficient)) for part in self.parts)
        return Sum(parts, scale(self.shift) if self.is_shifted else 0.0)

    @property
    def is_shifted(self) -> bool:
        """Whether a number is added. A tensor may be zero only for this micro-batch."""
        return isinstance(self.shift, Tensor) or self.shift != 0

    @property
    def is_undivided(self) -> bool:
        """Whether all parts are sums over samples, to which no number is added."""
        return not self.is_shifted and all(part.divisor is None for part in self.parts)

    @property
    def is_plain(self) -> bool:
        """Whether this is a single sum over samples, undivided and without an added number."""
        return self.is_undivided and len(self.parts) == 1


def combined(operation: Operation) -> Sum | Divisor:
    """Return the result of a torch call whose arguments include sums of terms, or counts with a lower bound.

    Raises:
        LostError: it is no sum of such terms times numbers, so that micro-batches of the result would not add up.
    """
    if any(rows for _, rows in operation.operands):
        raise LostError("combines a sum over samples with single samples")
    first = operation.states[0]
    changed = _of_one(operation, first) if isinstance(first, Sum | Divisor) else None
    if changed is not None:
        return changed
    if operation.call.arguments[1] or len(operation.values) != 2:
        raise LostError("is no sum of terms times numbers")
    one, other = (
        state if isinstance(state, Sum | Divisor) else _constant(operation, place)
        for place, state in enumerate(operation.states)
    )
    if operation.name in ("rsub", "__rsub__"):
        one, other = other, one
    if isinstance(one, Sum) and operation.name in DIVISIONS:
        return _quotient(operation, one, other)
    if operation.scaled:
        raise LostError("takes the number of samples")
    if isinstance(one, Divisor):
        return _multiple(operation.name, one, other)
    if isinstance(other, Divisor):
        return _multiple(operation.name, other, one)
    return _of_two(operation.name, one, other)


def _of_one(operation: Operation, terms: Sum | Divisor) -> Sum | Divisor | None:
    """Return the result of a function of one sum or count; None for other functions."""
    name = operation.name
    if name in _CONVERSIONS and not operation.results[0].dim():
        if _truncates(operation.values[0].dtype, operation.results[0].dtype):
            raise LostError("rounds a sum over samples, or may overflow")
        if isinstance(terms, Divisor) or name != "detach":
            return terms
        return terms._replace(parts=tuple(part._replace(gradient=False) for part in terms.parts))
    if isinstance(terms, Sum) and name in ("neg", "negative"):
        return terms.scaled(operator.neg)
    if isinstance(terms, Sum) and name in ("clamp", "clip", "clamp_min"):
        return _at_least(operation, terms)
    return None


def _truncates(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Return True if a number that is converted to another dtype may change by more than rounding."""
    return not to.is_floating_point and (dtype.is_floating_point or to.itemsize < dtype.itemsize)


def _of_two(name: str, one: Sum | float | Tensor, other: Sum | float | Tensor) -> Sum:
    """Return the result of a function of two sums, or of a sum and a number."""
    if name in ("add", "__radd__"):
        return _sum(one).plus(_sum(other))
    if name in ("sub", "subtract", "rsub", "__rsub__"):
        return _sum(one).plus(_sum(other).scaled(operator.neg))
    if name in _PRODUCTS and isinstance(one, Sum) and not isinstance(other, Sum):
        return one.scaled(lambda part: part * other)
    if name in _PRODUCTS and isinstance(other, Sum) and not isinstance(one, Sum):
        return other.scaled(lambda part: part * one)
    raise LostError("is no sum of terms times numbers, as it multiplies or divides by a sum over samples")


def _multiple(name: str, count: Divisor, number: Any) -> Divisor:
    """Return a count with a lower bound times a positive number."""
    if name in _PRODUCTS and isinstance(number, int | float) and number > 0:
        return Divisor(lambda values: count.part(values) * number, count.operands, count.least * number)
    raise LostError("takes a count with a lower bound for more than to divide by it")


def _quotient(operation: Operation, one: Sum, other: Any) -> Sum:
    """Return sums that are divided by a constant, by a number of samples, or by a count: a sum without a gradient."""
    if not isinstance(other, Sum | Divisor) and not operation.scaled:
        return one.scaled(lambda part: part / other)
    if not one.is_undivided:
        raise LostError(_NOT_PLAIN if not operation.scaled else _NOT_ALONE)
    if isinstance(other, Sum):
        divisor = _count(other)
    else:
        divisor = other if isinstance(other, Divisor) else Divisor(lambda _: float(other))
    return Sum(tuple(part._replace(divisor=divisor) for part in one.parts))


def _count(terms: Sum) -> Divisor:
    """Return the count that a sum over samples without a gradient is."""
    if not terms.is_plain:
        raise LostError(_NOT_PLAIN)
    (count,) = terms.parts
    number, factor = count.number, count.coefficient
    if count.gradient:
        raise LostError("divides by a sum over samples that has a gradient")
    if isinstance(factor, Tensor):
        raise LostError("divides by a sum over samples times a tensor: use a number")
    return Divisor(lambda values: on_host(values(number).detach() * factor), (number,))


def _at_least(operation: Operation, terms: Sum) -> Divisor:
    """Return a count, of which a number takes the place if that of the mini-batch is smaller."""
    least = operation.argument(1, "min")
    is_count = terms.is_plain and not terms.parts[0].gradient
    if not is_count or not isinstance(least, int | float) or operation.argument(2, "max") is not None:
        raise LostError("bounds a sum over samples that is no count, or bounds one from above")
    return _count(terms)._replace(least=float(least))


def _sum(part: Sum | float | Tensor) -> Sum:
    return part if isinstance(part, Sum) else Sum((), part)


def _constant(operation: Operation, place: int) -> Sum | float | Tensor:
    """Return an argument that is the same for all micro-batches: a number, or a tensor without dimensions.

    One with a gradient, such as a penalty of parameters, counts once: it is a mean over samples.
    """
    value, leaf = operation.values[place], operation.call.leaves[place]
    if type(value) in (int, float):
        return value
    if operation.is_written:
        raise LostError("takes a tensor that the loss writes afterwards")
    if isinstance(value, Tensor) and not value.dim() and not value.requires_grad:
        return value.detach().clone()
    if isinstance(value, Tensor) and not value.dim() and isinstance(leaf, Ref):
        samples = float(operation.samples)
        return Sum((Part(leaf.number, True, divisor=Divisor(lambda _: samples), divided=True),))
    raise LostError("is no sum of terms times numbers")
