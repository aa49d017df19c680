"""Linear algebra on loss terms: add, scale, and divide by a count."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .operations import Call, LostError, names
from .terms import Count, Terms, on_host

DIVISIONS = names("div divide true_divide __truediv__")
_CONVERSIONS = names(
    "to float double half bfloat16 type cpu cuda clone contiguous squeeze view reshape detach"
)


def combined(call: Call, count_of: Callable[[float], Count | None]) -> Terms:
    """Return the result of a torch call whose arguments include sums of terms.

    Args:
        call: the call.
        count_of: returns the count that a number is: a number of samples, or a sum that was read; None for others.

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
    if isinstance(first, Terms) and (least := least_of(call)) is not None:
        return _at_least(first, least)
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
    return _scaled(call, one, other, count_of)


def _scaled(call: Call, one: Any, other: Any, count_of: Callable[[float], Count | None]) -> Terms:
    """Return a product or a quotient of terms and a number."""
    if call.name in ("mul", "multiply", "__rmul__"):
        terms, number = (one, other) if isinstance(one, Terms) else (other, one)
        return _terms(terms).scaled(lambda part: part * number)
    if call.name not in DIVISIONS or not isinstance(one, Terms):
        raise LostError("is no sum of terms times numbers")
    if type(other) in (int, float) and is_sum(one) and (count := count_of(other)) is not None:
        return Terms((one.terms[0]._replace(divisor=count),))
    return one.scaled(lambda part: part / other)


def least_of(call: Call) -> float | None:
    """Return the lower bound in a call such as ``count.clamp(min=1)``; None for other calls."""
    if call.name not in ("clamp", "clip", "clamp_min") or call.argument(2, "max") is not None:
        return None
    least = call.argument(1, "min")
    return float(least) if isinstance(least, int | float) else None


def _at_least(terms: Terms, least: float) -> Terms:
    """Return a count, of which ``least`` takes the place if that of the mini-batch is smaller."""
    if not is_sum(terms) or terms.terms[0].tensor.requires_grad:
        raise LostError("bounds a sum over samples that is no count")
    return Terms((terms.terms[0]._replace(least=least),))


def is_sum(terms: Terms) -> bool:
    """Return True for a single undivided term without an added number."""
    plain = not isinstance(terms.shift, Tensor) and not terms.shift
    return plain and len(terms.terms) == 1 and terms.terms[0].divisor is None


def _quotient(call: Call, one: Terms, other: Terms) -> Terms:
    """Return a sum that is divided by a count, which is another sum and has no gradient."""
    if call.name not in DIVISIONS or not is_sum(one) or not is_sum(other):
        raise LostError(
            "multiplies or divides by a sum over samples, or adds a number to one and divides by it"
        )
    (term,), (count,) = one.terms, other.terms
    if count.tensor.requires_grad:
        raise LostError("divides by a sum over samples that has a gradient")
    factor, replay = count.coefficient, call.replay_of(call.leaves[1])
    divisor = Count(
        on_host(count.tensor.detach() * factor),
        replay and (lambda *step: on_host(replay(*step))),  # computes the coefficient as well
        least=count.least,
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
