"""Follows a loss that is computed for a micro-batch, call by call, and weighs the parts of the loss on the way.

It costs some microseconds a call of torch, so that each step can afford it: what was found out about a loss by looking
into it holds as long as the same calls are made with the same arguments, tensors and factors excepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .calls import READS, Diverged, Kind, Record, Term, writes
from .counting import REDUCING, arguments, divisor, is_over_classes
from .valueless import all_meta

_COMPARED = (bool, int, float, str, torch.dtype, torch.device, torch.memory_format)
_LARGEST_NAMED = 64  # elements of a tensor that may hold parts of a loss

Call = tuple[Any, ...]  # a function, and what its arguments are


class Followed(TorchFunctionMode):
    """While a loss runs in it, each of its terms can be the micro-batch's part in that of the mini-batch.

    Args:
        own, whole: what was seen for the micro-batch, or for one of its kind, and for the mini-batch.
        parts: micro-batches.
        scaled: whether terms are multiplied by their weights; if not, all have the same, :attr:`weight`.
        calls: those of the last loss of this kind; None where there was none.
    """

    def __init__(
        self, own: Record, whole: Record, parts: int, *, scaled: bool, calls: list[Call] | None = None
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.counts: list[float] = []
        self._own, self._whole, self._parts, self._scaled = own, whole, parts, scaled
        self._expected = calls
        self._factors: list[float] = []
        self._terms = {
            term.call: (term, total)
            for term, total in zip(own.terms, whole.terms, strict=True)
            if term.call >= 0
        }
        self._origins: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no id is used twice
        if not scaled:
            own_terms = zip(own.terms, whole.terms, strict=True)
            self._factors = [
                factor(term.kind, term.count, total.count, parts)
                for term, total in own_terms
                if term.call < 0
            ]

    @property
    def weight(self) -> float:
        """What the loss weighs, now that it is computed.

        Raises:
            Diverged: its terms do not weigh the same.
        """
        if self._scaled:
            return 1.0
        if len(set(self._factors)) != 1:
            raise Diverged
        return self._factors[0]

    def finish(self) -> None:
        """Checks that the loss has made all calls.

        Raises:
            Diverged: it has not.
        """
        if self._expected is not None and len(self.calls) != len(self._expected):
            raise Diverged

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        number = len(self.calls)
        self._check(number, func, args, kwargs)
        if number in self._whole.shared:
            args, kwargs = self._replace(number, func.__name__, args, kwargs)
        found = self._terms.get(number)
        result = func(*args, **kwargs) if found is None else self._weighed(func, args, kwargs, *found)
        if isinstance(result, Tensor):
            self._name(number, result)
        elif isinstance(result, tuple | list):
            for tensor in result:
                if isinstance(tensor, Tensor):
                    self._name(number, tensor)
        return result

    def _name(self, number: int, tensor: Tensor) -> None:
        if tensor.numel() <= _LARGEST_NAMED:
            self._origins[id(tensor)] = number
            self._kept.append(tensor)

    def _check(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """That the call is the one which was made before."""
        loose, origins = number in self._whole.loose, self._origins
        call = (
            func,
            *[
                origins.get(id(value), Tensor) if isinstance(value, Tensor) else self._trait(value, loose)
                for value in args
            ],
        )
        if kwargs:
            call += tuple([(name, self._trait(value, loose)) for name, value in kwargs.items()])
        self.calls.append(call)
        if self._expected is not None:
            if number >= len(self._expected) or self._expected[number] != call:
                raise Diverged
        elif self._own.names and func.__name__ not in self._own.names[number : number + 1]:
            raise Diverged
        if number in self._whole.zeros:
            leaves = pytree.tree_leaves((args, kwargs))
            if any(float(leaves[index]) for index in self._whole.zeros[number]):
                raise Diverged

    def _trait(self, value: Any, loose: bool) -> Any:
        """What of an argument must not change."""
        if isinstance(value, Tensor):
            return self._origins.get(id(value), Tensor)
        if loose and isinstance(value, int | float):
            return float
        if isinstance(value, tuple | list):
            return tuple([self._trait(item, loose) for item in value])
        if isinstance(value, slice):
            return tuple([self._trait(item, loose) for item in (value.start, value.stop, value.step)])
        return value if isinstance(value, _COMPARED) else type(value)

    def _replace(
        self, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with what belongs to no sample as the mini-batch has it."""
        if writes(name) or (name in READS and self._own.keeps_reads):
            return args, kwargs
        leaves = _leaves(args, kwargs)
        changed = False
        for index, value in self._whole.shared[number].items():
            own = leaves[index] if index < len(leaves) else None
            if isinstance(own, Tensor) and own.shape == value.shape:
                leaves[index] = value.to(own.device, own.dtype)
                changed = True
        return _rebuilt(args, kwargs, leaves) if changed else (args, kwargs)

    def _weighed(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], term: Term, total: Term
    ) -> Any:
        own = term.count
        if term.kind is Kind.MEAN:
            own = self._count(func, args, kwargs, term)
        self.counts.append(own)
        weight = factor(term.kind, own, total.count, self._parts)
        if not self._scaled:
            self._factors.append(weight)
            return func(*args, **kwargs)
        if term.kind is Kind.SUM:
            return func(*args, **kwargs)
        if term.kind is Kind.CONSTANT:
            leaves = _leaves(args, kwargs)
            leaves[term.leaf] = leaves[term.leaf] * weight
            args, kwargs = _rebuilt(args, kwargs, leaves)
            return func(*args, **kwargs)
        if own or not total.count:
            return func(*args, **kwargs) * weight
        return _sum(func, args, kwargs) / total.count

    def _count(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], term: Term
    ) -> float:
        """What a mean is a mean of."""
        if func not in REDUCING:
            return float((args[0] if args else kwargs["input"]).numel())
        given = arguments(func, args, kwargs)
        if is_over_classes(func, given):
            return divisor(func, given).number
        shapes = tuple(leaf.shape for leaf in _leaves(args, kwargs) if isinstance(leaf, Tensor))
        return term.count if shapes == term.shapes else divisor(func, all_meta(given)).number


def factor(kind: Kind, own: float, total: float, parts: int) -> float:
    """What a term is multiplied by."""
    if kind is Kind.SUM:
        return 1.0
    return own / total if total else 1 / parts


def _sum(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the mean that a call gives is a mean of, added up."""
    if func in REDUCING:
        return func(*args, **{**kwargs, "reduction": "sum"})
    return torch.sum(args[0] if args else kwargs["input"])


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What pytree finds in the arguments, in its order."""
    flat = [*args, *kwargs.values()]
    for value in flat:
        if isinstance(value, tuple | list | dict):
            return pytree.tree_leaves((args, kwargs))
    return flat


def _rebuilt(
    args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return pytree.tree_unflatten(leaves, pytree.tree_structure((args, kwargs)))
