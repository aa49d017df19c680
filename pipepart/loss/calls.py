"""The calls of torch that a loss makes, in their order: the same ones for every micro-batch and for all of them.

What a loss computes from the target alone and is of one shape for a micro-batch and for the mini-batch, as a number
of tokens or a weight for each class is, does not belong to a sample. The mini-batch's takes its place, so that
``(losses * mask).sum() / mask.sum()`` divides each micro-batch's sum by the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .counting import REDUCING

_READS = frozenset({"item", "__float__", "__int__", "__bool__", "__index__", "tolist"})
_LARGEST_SHARED = 4096  # elements; what belongs to no sample is a number or a row of classes


class Kind(StrEnum):
    """How the parts of micro-batches make up what a call gives for the mini-batch."""

    SUM = "sum"  # they add up
    MEAN = "mean"  # each weighs what it is a mean of
    OWN = "own"  # a scalar that the model made, a mean over samples
    CONSTANT = "constant"  # no sample has a part in it


@dataclass(frozen=True)
class Term:
    """One call that gives a part of the loss.

    Attributes:
        call: its number; -1 for what the model made.
        kind: how its parts add up.
        count: what a mean is a mean of.
        leaf: of a constant which argument it is, of an own scalar which tensor of the output.
        sum_may_stay: whether the sum need not be zero where the count is.
    """

    call: int
    kind: Kind
    count: float = 0.0
    leaf: int = 0
    sum_may_stay: bool = False


@dataclass
class Record:
    """What was seen of one call of a loss.

    Attributes:
        terms: the parts of the loss.
        names: of all calls of torch.
        shared: of some calls the tensors that may belong to no sample, by the argument's place.
        ratios: of numbers that belong to no sample, the micro-batch's own by the mini-batch's.
        adds_up: whether the loss is a sum of the terms, each times some number.
        replaced: whether a tensor that belongs to no sample had another value in the micro-batch.
        numbers: that were given to calls together with what the model made.
        keeps_reads: whether what the loss reads as a Python number stays the micro-batch's own.
        differs_in_reads: whether that is another number than the mini-batch's.
        count: of a loss that returns its sum and its count, the count; None where it cannot be known yet.
        pair: whether it returns these two.
    """

    terms: list[Term] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shared: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)
    adds_up: bool = False
    replaced: bool = False
    numbers: list[float] = field(default_factory=list)
    keeps_reads: bool = False
    differs_in_reads: bool = False
    pair: bool = False
    count: float | None = None

    def agrees_with(self, other: Record) -> bool:
        """Whether both were made by the same calls."""
        ours, theirs = ([(term.call, term.kind, term.leaf) for term in r.terms] for r in (self, other))
        return self.adds_up and other.adds_up and ours == theirs and self.names == other.names


class Numbered(TorchFunctionMode):
    """Numbers the calls, and replaces what belongs to no sample by what the mini-batch has."""

    def __init__(self, whole: Record | None, keeps_reads: bool) -> None:
        super().__init__()
        self._number = -1
        self._keeps_reads = keeps_reads
        self.differs_in_reads = False
        self._shared = whole.shared if whole else {}

    def next_call(self, leaves: list[Any], name: str) -> bool:
        """Whether any of the arguments of the call that comes next has been replaced, with another value."""
        self._number += 1
        changed = False
        for index, value in self._shared.get(self._number, {}).items():
            own = leaves[index] if index < len(leaves) else None
            if not isinstance(own, Tensor) or own.shape != value.shape or writes(name):
                continue
            value = value.to(own.device, own.dtype)
            if name in _READS and self._keeps_reads:
                self.differs_in_reads |= not torch.equal(value, own)
                continue
            leaves[index] = value
            changed |= not torch.equal(value, own)
        return changed


def may_be_shared(tensor: Tensor) -> bool:
    """Whether a tensor is small enough to belong to no sample."""
    return tensor.numel() <= _LARGEST_SHARED


def writes(name: str) -> bool:
    """Whether a call of torch writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")


class Diverged(Exception):
    """A loss makes other calls than were seen."""


class Played(Numbered):
    """While a loss runs in it, each of its terms is the micro-batch's part in that of the mini-batch.

    Args:
        own, whole: what was seen for the micro-batch and for the mini-batch.
        factors: what each term is multiplied by.
    """

    def __init__(self, own: Record, whole: Record, factors: Sequence[float]) -> None:
        super().__init__(whole, own.keeps_reads)
        self._names = own.names
        self._terms = {
            term.call: (term, total, factor)
            for term, total, factor in zip(own.terms, whole.terms, factors, strict=True)
            if term.kind is not Kind.OWN
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        self.next_call(leaves, func.__name__)
        if self._number >= len(self._names) or self._names[self._number] != func.__name__:
            raise Diverged
        found = self._terms.get(self._number)
        if found is not None and found[0].kind is Kind.CONSTANT:
            leaves[found[0].leaf] = leaves[found[0].leaf] * found[2]
        given, options = pytree.tree_unflatten(leaves, spec)
        if found is None or found[0].kind is not Kind.MEAN:
            return func(*given, **options)
        term, total, factor = found
        if term.count or not total.count:
            return func(*given, **options) * factor
        return _sum(func, given, options) / total.count


def _sum(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the mean that a call gives is a mean of, added up."""
    if func in REDUCING:
        return func(*args, **{**kwargs, "reduction": "sum"})
    return torch.sum(args[0] if args else kwargs["input"])
