"""Sums of terms, as a loss computes them from means and sums over samples: added, scaled, and divided by counts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..capture.recorded.recording.tables import words
from .rules import LostError, Operation
from .terms import on_host

Values = Callable[[int], Tensor]  # returns a tensor of a micro-batch by its number

DIVISIONS = words("div divide true_divide __truediv__")
_CONVERSIONS = words(
    "to float double half bfloat16 type cpu cuda clone contiguous squeeze view reshape detach"
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
    least: float = 0.0


class Part(NamedTuple):
    """A mean or a sum over the samples of a micro-batch, as a term of its loss.

    Attributes:
        number: of its tensor.
        gradient: whether that tensor has a gradient.
        coefficient: the number that it is multiplied by.
        divisor: None for a sum.
        divided: whether the tensor has been divided by the count of its micro-batch.
        least: of a count, the lower bound that the loss gives it.
        summed: computes the sum instead of the mean, for use if the count is 0.
    """

    number: int
    gradient: bool
    coefficient: float | Tensor = 1.0
    divisor: Divisor | None = None
    divided: bool = False
    least: float = 0.0
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
        return Sum(parts, scale(self.shift))

    @property
    def is_plain(self) -> bool:
        """Whether this is a single sum over samples, undivided and without an added number."""
        plain = not isinstance(self.shift, Tensor) and not self.shift
        return plain and len(self.parts) == 1 and self.parts[0].divisor is None


def combined(operation: Operation) -> Sum:
    """Return the result of a torch call whose arguments include sums of terms.

    Raises:
        LostError: it is no sum of such terms times numbers, so that micro-batches of the result would not add up.
    """
    if any(rows for _, rows in operation.operands):
        raise LostError("combines a sum over samples with single samples")
    name, first = operation.name, operation.states[0]
    if isinstance(first, Sum) and name in _CONVERSIONS and not operation.results[0].dim():
        return (
            Sum(tuple(part._replace(gradient=False) for part in first.parts)) if name == "detach" else first
        )
    if isinstance(first, Sum) and name in ("neg", "negative"):
        return first.scaled(operator.neg)
    if isinstance(first, Sum) and name in ("clamp", "clip", "clamp_min"):
        return _at_least(operation, first)
    if operation.call.arguments[1] or len(operation.values) != 2:
        raise LostError("is no sum of terms times numbers")
    one, other = (
        state if isinstance(state, Sum) else _number(value, operation.is_written)
        for value, state in zip(operation.values, operation.states, strict=True)
    )
    if name in ("rsub", "__rsub__"):
        one, other = other, one
    if isinstance(one, Sum) and name in DIVISIONS:
        return _quotient(operation, one, other)
    if operation.scaled:
        raise LostError("takes the number of samples")
    if name in ("add", "__radd__"):
        return _sum(one).plus(_sum(other))
    if name in ("sub", "subtract", "rsub", "__rsub__"):
        return _sum(one).plus(_sum(other).scaled(operator.neg))
    if name in ("mul", "multiply", "__rmul__") and not (isinstance(one, Sum) and isinstance(other, Sum)):
        terms, number = (one, other) if isinstance(one, Sum) else (other, one)
        return _sum(terms).scaled(lambda part: part * number)
    raise LostError("is no sum of terms times numbers, as it multiplies or divides by a sum over samples")


def _quotient(operation: Operation, one: Sum, other: Any) -> Sum:
    """Return a sum that is divided by a constant, by a number of samples, or by a count: a sum without a gradient."""
    if isinstance(other, Sum):
        if not one.is_plain or not other.is_plain:
            raise LostError(
                "multiplies or divides by a sum over samples, or adds a number to one and divides by it"
            )
        (count,) = other.parts
        number, factor = count.number, count.coefficient
        if count.gradient:
            raise LostError("divides by a sum over samples that has a gradient")
        if isinstance(factor, Tensor):
            raise LostError("divides by a sum over samples times a tensor: use a number")
        divisor = Divisor(lambda values: on_host(values(number).detach() * factor), (number,), count.least)
    elif operation.scaled:
        if not one.is_plain:
            raise LostError("takes the number of samples: divide a sum over samples by it alone")
        divisor = Divisor(lambda _: float(other))
    else:
        return one.scaled(lambda part: part / other)
    return Sum((one.parts[0]._replace(divisor=divisor),))


def _at_least(operation: Operation, terms: Sum) -> Sum:
    """Return a count, of which a number takes the place if that of the mini-batch is smaller."""
    least = operation.argument(1, "min")
    is_count = terms.is_plain and not terms.parts[0].gradient
    if not is_count or not isinstance(least, int | float) or operation.argument(2, "max") is not None:
        raise LostError("bounds a sum over samples that is no count, or bounds one from above")
    return Sum((terms.parts[0]._replace(least=float(least)),))


def _sum(part: Sum | float | Tensor) -> Sum:
    return part if isinstance(part, Sum) else Sum((), part)


def _number(value: Any, is_written: bool) -> float | Tensor:
    """Return a constant: a number, or a tensor without dimensions."""
    if type(value) in (int, float):
        return value
    if is_written:
        raise LostError("takes a tensor that the loss writes afterwards")
    if isinstance(value, Tensor) and not value.dim() and not value.requires_grad:
        return value.detach().clone()
    raise LostError("is no sum of terms times numbers")
