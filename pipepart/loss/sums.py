"""Sums of terms, as a loss computes them from means and sums over samples: added, scaled, and divided by counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..capture.recorded.recording.tables import words
from .rules import LostError, Operation
from .tape import Ref
from .terms import on_host

Number = float | Tensor  # a tensor without dimensions
Values = Callable[[int], Tensor]  # returns a tensor of a micro-batch by its number

_DIVISIONS = words("div divide true_divide __truediv__ __itruediv__")
_PRODUCTS = words("mul multiply __rmul__ __imul__")
_SUMS = words("add __radd__ __iadd__")
_DIFFERENCES = words("sub subtract rsub __rsub__ __isub__")
_CONVERSIONS = words(
    "to type_as float double half bfloat16 long int type cpu cuda clone contiguous squeeze view reshape detach sum mean"
)
_NOT_PLAIN = "multiplies or divides by a sum over samples, or adds a number to one and divides by it"
_NO_SUM = (
    "is no sum of terms times numbers, as it multiplies or divides by a sum over samples or by a tensor with a "
    "gradient: multiply the loss of each sample by it"
)


class Divisor(NamedTuple):
    """What a term is divided by: the sum of the counts of all micro-batches.

    Attributes:
        part: computes the count of a micro-batch from its tensors.
        operands: the numbers of the tensors that it is computed from; none if it is in proportion to the samples.
        least: what the loss divides by if the sum of the counts is smaller, as in ``count.clamp(min=1)``.
        of_all: computes the counts of all micro-batches from their tensors at once, if there is one operand.
    """

    part: Callable[[Values], float | Tensor]
    operands: tuple[int, ...] = ()
    least: float = -math.inf
    of_all: Callable[[Sequence[Tensor]], Sequence[float | Tensor]] | None = None


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
    coefficient: Number = 1.0
    divisor: Divisor | None = None
    divided: bool = False
    summed: Callable[[Values], Tensor] | None = None


class Sum(NamedTuple):
    """A sum of parts plus a number ``shift``, which is added once per mini-batch."""

    parts: tuple[Part, ...]
    shift: float = 0.0

    def plus(self, other: Sum, sign: float = 1.0) -> Sum:
        """Return the sum of this and ``sign`` times the other."""
        other = other.times(sign)
        return Sum((*self.parts, *other.parts), self.shift + other.shift)

    def times(self, factor: Number) -> Sum:
        """Return the product with a number."""
        return self._scaled(lambda part: part * factor, factor)

    def over(self, number: Number) -> Sum:
        """Return the quotient with a number."""
        return self._scaled(lambda part: part / number, number)

    def divided_by(self, divisor: Divisor) -> Sum:
        """Return the quotient with a count, of sums over samples to which no number is added."""
        if self.shift or any(part.divisor is not None for part in self.parts):
            raise LostError(_NOT_PLAIN)
        return Sum(tuple(part._replace(divisor=divisor) for part in self.parts))

    @property
    def as_count(self) -> Divisor:
        """The count that a sum over samples without a gradient is."""
        if self.shift or len(self.parts) != 1 or self.parts[0].divisor is not None:
            raise LostError(_NOT_PLAIN)
        number, gradient, factor, *_ = self.parts[0]
        if gradient or isinstance(factor, Tensor):
            raise LostError("divides by a sum over samples that has a gradient, or times a tensor")
        return Divisor(lambda values: on_host(values(number).detach() * factor), (number,))

    def _scaled(self, scale: Callable[[Any], Any], by: Number) -> Sum:
        if isinstance(by, Tensor) and (by.requires_grad or self.shift):
            raise LostError(_NO_SUM)
        parts = tuple(part._replace(coefficient=scale(part.coefficient)) for part in self.parts)
        return Sum(parts, scale(self.shift) if self.shift else 0.0)


def combined(operation: Operation) -> Sum | Divisor:
    """Return the result of a torch call whose arguments include sums of terms, or counts with a lower bound.

    Raises:
        LostError: it is no sum of such terms times numbers, so that micro-batches of the result would not add up.
    """
    name, first = operation.call.name, operation.states[0]
    if name in _CONVERSIONS and isinstance(first, Sum | Divisor) and not operation.results[0].dim():
        return _converted(operation, first)
    if any(rows for _, rows in operation.operands):
        raise LostError("combines a sum over samples with single samples")
    if isinstance(first, Sum) and name in ("neg", "negative"):
        return first.times(-1)
    if isinstance(first, Sum) and name in ("clamp", "clip", "clamp_min"):
        return _at_least(operation, first)
    if operation.call.arguments[1] or len(operation.values) != 2:
        raise LostError(_NO_SUM)
    left, right = (
        state if isinstance(state, Sum | Divisor) else _constant(operation, place)
        for place, state in enumerate(operation.states)
    )
    if name in _SUMS or name in _DIFFERENCES:
        terms = [_addend(operation, place, part) for place, part in enumerate((left, right))]
        terms = terms[::-1] if name in ("rsub", "__rsub__") else terms
        return terms[0].plus(terms[1], 1 if name in _SUMS else -1)
    if isinstance(left, Sum) and name in _DIVISIONS:
        return _quotient(operation, left, right)
    if operation.scaled:
        raise LostError("takes the number of samples")
    if name in _PRODUCTS:
        return _product(left, right)
    raise LostError(_NO_SUM)


def _converted(operation: Operation, terms: Sum | Divisor) -> Sum | Divisor:
    """Return the same terms, of which a ``detach`` takes the gradient."""
    was, now = operation.values[0].dtype, operation.results[0].dtype
    if not now.is_floating_point and (was.is_floating_point or now.itemsize < was.itemsize):
        raise LostError("rounds a sum over samples, or may overflow")
    if isinstance(terms, Divisor) or operation.call.name != "detach":
        return terms
    return terms._replace(parts=tuple(part._replace(gradient=False) for part in terms.parts))


def _product(first: Sum | Divisor | Number, second: Sum | Divisor | Number) -> Sum | Divisor:
    """Return the product of sums or of a count with a number; a count is multiplied by positive ones only."""
    if not isinstance(first, Sum | Divisor):
        first, second = second, first
    if isinstance(second, Sum | Divisor):
        raise LostError(_NO_SUM)
    if isinstance(first, Sum):
        return first.times(second)
    assert isinstance(first, Divisor)
    if isinstance(second, Tensor) or second <= 0:
        raise LostError("takes a count with a lower bound for more than to divide by it")
    count = first.part
    return Divisor(lambda values: count(values) * second, first.operands, first.least * second)


def _quotient(operation: Operation, dividend: Sum, divisor: Sum | Divisor | Number) -> Sum:
    """Return sums that are divided by a number, by a number of samples, or by a count."""
    if isinstance(divisor, Sum | Divisor):
        return dividend.divided_by(divisor.as_count if isinstance(divisor, Sum) else divisor)
    if not operation.scaled:
        return dividend.over(divisor)
    return dividend.divided_by(Divisor(lambda _: float(divisor)))


def _at_least(operation: Operation, terms: Sum) -> Divisor:
    """Return a count, of which a number takes the place if that of the mini-batch is smaller."""
    least = operation.call.argument(1, "min")
    if not isinstance(least, int | float) or operation.call.argument(2, "max") is not None:
        raise LostError("bounds a sum over samples from above, or by a tensor")
    return terms.as_count._replace(least=float(least))


def _addend(operation: Operation, place: int, part: Sum | Divisor | Number) -> Sum:
    """Return a term of a sum.

    A tensor that the loss computes from constants, as a penalty of parameters, counts once: it is a mean over samples.
    """
    leaf = operation.call.leaves[place]
    if isinstance(part, Tensor) and isinstance(leaf, Ref):
        samples = float(operation.samples)
        mean = Divisor(lambda _: samples)
        return Sum((Part(leaf.number, part.requires_grad, divisor=mean, divided=True),))
    if operation.scaled or isinstance(part, Divisor | Tensor):
        raise LostError(_NO_SUM if not operation.scaled else "takes the number of samples")
    return part if isinstance(part, Sum) else Sum((), part)


def _constant(operation: Operation, place: int) -> Number:
    """Return an argument that is the same for all micro-batches: a number, or a tensor without dimensions."""
    value = operation.values[place]
    if type(value) in (int, float) or (
        isinstance(value, Tensor) and not value.dim() and not operation.is_written
    ):
        return value
    raise LostError(_NO_SUM)
