"""Sums and means over samples, and what stays one when it is computed with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from .extent import Extent
from .operations import Call, LostError, named_dims, names
from .terms import Count, Predict, Term, on_host

_UNARY = names(
    "to float double half bfloat16 type cpu cuda clone contiguous squeeze view reshape flatten type_as "
    "detach data sum mean neg negative"
)
_ADD, _SUBTRACT = frozenset(("add", "__radd__")), frozenset(("sub", "subtract"))
_REVERSED = frozenset(("rsub", "__rsub__"))
_MULTIPLY = frozenset(("mul", "multiply", "__rmul__"))
_DIVIDE = frozenset(("div", "divide", "true_divide"))
_CLAMP = frozenset(("clamp", "clamp_min", "clip"))


class Sum(NamedTuple):
    """A sum of terms and a number: ``terms + shift``, or ``floor`` if that is more.

    Attributes:
        key: names its value in every micro-batch.
        replay: gives the one term that it has from another target, where it comes from the target alone.
        parts: of a stack of sums, these; it has no terms of its own then.
    """

    terms: tuple[Term, ...]
    key: Hashable
    shift: float = 0.0
    floor: float | None = None
    replay: Predict | None = None
    parts: tuple[Sum, ...] = ()


def reduced(
    call: Call, key: Hashable, replay: Predict | None, replay_of: Callable[[Hashable], Predict | None]
) -> Sum | None:
    """What a call gives that sums or takes a mean over samples; None for any other call.

    Args:
        call: on tensors that hold samples.
        key: names its value.
        replay: gives its value from another target.
        replay_of: the same for a mask, by what names it.
    """
    if call.name not in ("sum", "mean", "count_nonzero"):
        return None
    tensor, place = call.first()
    dims = named_dims(call, tensor.dim(), 1) or set(range(tensor.dim()))
    if place.dim not in dims:
        return None
    if call.name != "mean":
        return Sum((Term(call.result),), key, replay=replay)
    number = prod(tensor.shape[dim] for dim in dims)
    order = place.order
    masked = isinstance(order, tuple) and order[0] == "masked"
    mask = replay_of(order[1]) if masked and isinstance(order, tuple) else None
    rest = prod(tensor.shape[dim] for dim in dims if dim != place.dim)
    predict = (lambda target: on_host(mask(target).sum() * rest)) if mask is not None else None  # type: ignore[union-attr]
    count = Count(float(number), predict=predict, steady=not masked)
    return Sum((Term(call.result, divisor=count, divided=True),), key)


def combined(
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    operands: Sequence[tuple[Any, Sum | None]],
    key: Hashable,
) -> Sum:
    """What a call on sums over samples gives.

    Args:
        name, func, args, kwargs, result: the call.
        operands: all that it is called with, with the sums.
        key: names its value.

    Raises:
        LostError: micro-batches of the result would not add up.
    """
    first, own = operands[0]
    if name == "stack" or (own is not None and own.parts):
        return _stacked(name, operands, own, key)
    if name in _UNARY:
        return _mapped(own, func, args, kwargs, name, result, key)
    if name in _CLAMP:
        return _clamped(own, args, kwargs, key)
    if kwargs or len(operands) != 2 or not isinstance(result, Tensor) or result.dim():
        raise LostError("is no sum of terms times numbers")
    second, theirs = operands[1]
    if name in _ADD:
        return _added(_as_sum(first, own, key), _as_sum(second, theirs, key), key)
    if name in _SUBTRACT:
        return _added(_as_sum(first, own, key), _scaled(_as_sum(second, theirs, key), -1.0), key)
    if name in _REVERSED:
        return _added(_as_sum(second, theirs, key), _scaled(_as_sum(first, own, key), -1.0), key)
    if name in _MULTIPLY and own is not None and theirs is not None:
        raise LostError("multiplies two sums over samples")
    if name in _MULTIPLY:
        total, factor = (own, second) if own is not None else (theirs, first)
        return _times(total, factor, lambda tensor: func(tensor, factor), key)
    if name in _DIVIDE and own is not None:
        return _quotient(own, second, theirs, lambda tensor: func(tensor, second), key)
    raise LostError("is no sum of terms times numbers")


def _stacked(name: str, operands: Sequence[tuple[Any, Sum | None]], own: Sum | None, key: Hashable) -> Sum:
    """A stack of sums, and what is computed from it."""
    if name == "stack":
        parts = tuple(one for leaf, one in operands if one is not None)
        if len(parts) != sum(isinstance(leaf, Tensor) for leaf, _ in operands) or any(p.parts for p in parts):
            raise LostError("stacks sums over samples with other values")
        return Sum((), key, parts=parts)
    if own is None or name not in ("sum", "mean"):
        raise LostError("combines a stack of sums otherwise than by .sum() or .mean()")
    total = Sum((), key)
    for part in own.parts:
        total = _added(total, part, key)
    return total if name == "sum" else _scaled(total, 1 / len(own.parts))


def _quotient(
    own: Sum, other: Any, theirs: Sum | None, apply: Callable[[Tensor], Tensor], key: Hashable
) -> Sum:
    """A sum divided by a count, by the number of samples, or by a constant."""
    if theirs is not None:
        return _divided(own, _as_count(theirs), key)
    if isinstance(other, Extent):
        if other.degree != 1:
            raise LostError("divides by a power of the number of samples")
        return _divided(own, Count(float(other.plain), steady=True), key)
    return _times(own, 1 / other if isinstance(other, int | float) and other else other, apply, key)


def _mapped(
    own: Sum | None, func: Any, args: Any, kwargs: Any, name: str, result: Tensor, key: Hashable
) -> Sum:
    """A call that goes through sums: conversions, and sums over what is left of their dimensions."""
    if own is None or own.floor is not None:
        raise LostError("is no sum of terms times numbers")
    if name in ("neg", "negative"):
        return _scaled(own, -1.0)._replace(key=key)
    if own.shift and result.dim() != args[0].dim():
        raise LostError("is no sum of terms times numbers")
    if len(own.terms) == 1 and own.terms[0].coefficient == 1.0 and not own.shift:
        tensors = [result]
    else:
        tensors = [func(term.tensor, *args[1:], **kwargs) for term in own.terms]
    terms = tuple(term._replace(tensor=tensor) for term, tensor in zip(own.terms, tensors, strict=True))
    return own._replace(terms=terms, key=key)


def _as_sum(leaf: Any, known: Sum | None, key: Hashable) -> Sum:
    if known is not None:
        return known
    if isinstance(
        leaf, Tensor
    ):  # a constant counts once in the mini-batch: each micro-batch has its part of it
        if leaf.numel() != 1:
            raise LostError("adds a tensor with more than one element to a sum")
        one = Count(1.0, predict=lambda _: 1.0)
        return Sum((Term(leaf.reshape(()), divisor=one, divided=True),), key)
    if isinstance(leaf, Extent) or not isinstance(leaf, int | float):
        raise LostError("adds the number of samples")
    return Sum((), key, shift=float(leaf))


def _added(a: Sum, b: Sum, key: Hashable) -> Sum:
    if a.floor is not None or b.floor is not None:
        raise LostError("is no sum of terms times numbers")
    one = a if not b.terms else b if not a.terms else None
    return Sum((*a.terms, *b.terms), key, a.shift + b.shift, replay=one.replay if one else None)


def _scaled(own: Sum, factor: float) -> Sum:
    if own.floor is not None:
        raise LostError("is no sum of terms times numbers")
    terms = tuple(term._replace(coefficient=term.coefficient * factor) for term in own.terms)
    return own._replace(terms=terms, shift=own.shift * factor)


def _times(own: Sum | None, factor: Any, apply: Callable[[Tensor], Tensor], key: Hashable) -> Sum:
    if own is None or isinstance(factor, Extent):
        raise LostError("multiplies by the number of samples")
    if isinstance(factor, int | float):
        return _scaled(own, float(factor))._replace(key=key)
    if not isinstance(factor, Tensor) or factor.numel() != 1 or own.shift or own.floor is not None:
        raise LostError("is no sum of terms times numbers")
    terms = tuple(term._replace(tensor=apply(term.tensor)) for term in own.terms)
    return Sum(terms, key)


def _clamped(own: Sum | None, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> Sum:
    """A count that is at least a number, by which something is to be divided."""
    least = args[1] if len(args) > 1 else kwargs.get("min")
    single = own is not None and len(own.terms) == 1 and not own.terms[0].tensor.requires_grad
    if own is None or not single or own.floor is not None or len(args) > 2 or kwargs.get("max") is not None:
        raise LostError("clamps a sum over samples")
    if isinstance(least, bool | Extent) or not isinstance(least, int | float):
        raise LostError("clamps a sum over samples by something else than a number")
    return own._replace(floor=float(least), key=key)


def _as_count(own: Sum) -> Count:
    if len(own.terms) != 1 or own.terms[0].divisor is not None:
        raise LostError("divides by something else than one sum over samples")
    tensor, scale, *_ = own.terms[0]
    if tensor.requires_grad or tensor.dim():
        raise LostError("divides by a sum over samples that has a gradient of its own")
    replay = own.replay
    predict = (lambda target: on_host(replay(target))) if replay is not None else None  # type: ignore[arg-type, misc]
    return Count(on_host(tensor.detach()), scale, own.shift, own.floor, predict)


def _divided(own: Sum, count: Count, key: Hashable) -> Sum:
    if own.shift or own.floor is not None or any(term.divisor is not None for term in own.terms):
        raise LostError("divides what is no plain sum over samples by a count")
    return Sum(tuple(term._replace(divisor=count) for term in own.terms), key)
