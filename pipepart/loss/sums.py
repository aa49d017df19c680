"""What calls on sums of terms give: a loss adds terms up, multiplies them by numbers and divides them by counts."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from .operations import Call, LostError, names
from .terms import Count, Terms, on_host

_DIVISIONS = names("div divide true_divide __truediv__")
_CONVERSIONS = names(
    "to float double half bfloat16 type cpu cuda clone contiguous squeeze view reshape detach"
)


def combined(call: Call) -> Terms:
    """Return what a call on sums of terms gives.

    Raises:
        LostError: it is no sum of such terms times numbers, so that micro-batches of the result would not add up.
    """
    if any(rows for _, rows in call.operands):
        raise LostError("combines a sum over samples with single samples")
    first = call.states[0]
    if isinstance(first, Terms) and call.name in _CONVERSIONS and not call.result.dim():
        return first.detached() if call.name == "detach" else first
    if isinstance(first, Terms) and call.name in ("neg", "negative"):
        return first.scaled(operator.neg)
    if call.kwargs or len(call.leaves) != 2:
        raise LostError("is no sum of terms times numbers")
    one, other = (
        state if isinstance(state, Terms) else _number(leaf)
        for leaf, state in zip(call.leaves, call.states, strict=True)
    )
    if call.name in ("rsub", "__rsub__"):
        one, other = other, one
    if call.name in ("add", "__radd__"):
        return _terms(one).plus(_terms(other))
    if call.name in ("sub", "subtract", "rsub", "__rsub__"):
        return _terms(one).plus(_terms(other).scaled(operator.neg))
    if isinstance(one, Terms) and isinstance(other, Terms):
        return _quotient(call, one, other)
    if call.name in ("mul", "multiply", "__rmul__"):
        terms, number = (one, other) if isinstance(one, Terms) else (other, one)
        return _terms(terms).scaled(lambda part: part * number)
    if call.name in _DIVISIONS and isinstance(one, Terms):
        return one.scaled(lambda part: part / other)
    raise LostError("is no sum of terms times numbers")


def _quotient(call: Call, one: Terms, other: Terms) -> Terms:
    """Return a sum that is divided by a count, which is another sum and has no gradient."""
    (term, *others), (count, *more) = one.terms, other.terms
    sums = not (others or more) and term.divisor is None and count.divisor is None
    if call.name not in _DIVISIONS or not sums or count.tensor.requires_grad:
        raise LostError("multiplies or divides by a sum over samples")
    if any(isinstance(shift, Tensor) or shift for shift in (one.shift, other.shift)):
        raise LostError("adds a number to a sum over samples and divides it, or divides by it")
    factor, replay = count.coefficient, call.replay_of(call.leaves[1])
    divisor = Count(
        on_host(count.tensor.detach() * factor),
        replay and (lambda index: on_host(replay(index))),  # computes the coefficient as well
    )
    return Terms((term._replace(divisor=divisor),))


def _terms(part: Terms | float | Tensor) -> Terms:
    return part if isinstance(part, Terms) else Terms((), part)


def _number(leaf: Any) -> float | Tensor:
    """Return a constant: a number, or a tensor without dimensions, which the loss may write later."""
    if type(leaf) in (int, float):
        return leaf
    if isinstance(leaf, Tensor) and not leaf.dim() and not leaf.requires_grad:
        return leaf.detach().clone()
    raise LostError("is no sum of terms times numbers")
