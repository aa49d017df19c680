"""The calls of torch that a loss makes, in their order: the same ones for every micro-batch and for all of them.

What a loss computes from the target alone and is of one shape for a micro-batch and for the mini-batch, as a number
of tokens or a weight for each class is, does not belong to a sample. The mini-batch's takes its place, so that
``(losses * mask).sum() / mask.sum()`` divides each micro-batch's sum by the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .counting import count_targets
from .tape import Tape

READS = frozenset({"item", "__float__", "__int__", "__bool__", "__index__", "tolist"})
_LARGEST_SHARED = 4096  # elements; what belongs to no sample is a number or a row of classes


class Kind(StrEnum):
    """How the parts of micro-batches make up what a call gives for the mini-batch."""

    SUM = "sum"  # they add up
    MEAN = "mean"  # each weighs what it is a mean of
    OWN = "own"  # a scalar that the model made, a mean over samples
    CONSTANT = "constant"  # no sample has a part in it


class Classes(NamedTuple):
    """Of what a mean over class targets is computed: places on the tape, and the target that does not count."""

    target: int
    weight: int | None
    ignore_index: int


@dataclass(frozen=True)
class Term:
    """One call that gives a part of the loss.

    Attributes:
        call: its number; -1 for what the model made.
        kind: how its parts add up.
        count: what a mean is a mean of.
        leaf: of a constant which argument it is, of an own scalar which tensor of the output.
        sum_may_stay: whether the sum need not be zero where the count is.
        shapes: of the tensors that the call is given.
        classes: of a mean over class targets what it is computed of.
    """

    call: int
    kind: Kind
    count: float = 0.0
    leaf: int = 0
    sum_may_stay: bool = False
    shapes: tuple[torch.Size, ...] = ()
    classes: Classes | None = None

    def of_values(self, values: Sequence[Tensor]) -> Term:
        """The same with the count of other class targets."""
        if self.classes is None:
            return self
        target, weight, ignored = self.classes
        return replace(
            self, count=count_targets(values[target], None if weight is None else values[weight], ignored)
        )


@dataclass
class Record:
    """What was seen of one call of a loss.

    Attributes:
        terms: the parts of the loss.
        names: of all calls of torch.
        shared: of some calls the tensors that may belong to no sample, by the argument's place.
        shared_places: where these are on the tape.
        ratios: of numbers that belong to no sample, the micro-batch's own by the mini-batch's.
        adds_up: whether the loss is a sum of the terms, each times some number.
        replaced: whether a tensor that belongs to no sample had another value in the micro-batch.
        numbers: that were given to calls together with what the model made.
        keeps_reads: whether what the loss reads as a Python number stays the micro-batch's own.
        differs_in_reads: whether that is another number than the mini-batch's.
        count: of a loss that returns its sum and its count, the count; None where it cannot be known yet.
        pair: whether it returns these two.
        count_place: where that count is on the tape.
        complete: whether the loss has been seen to its end.
        reads: whether it takes numbers of Python from a target's scalar.
        opaque: whether it takes more than that out of the sight of torch.
        hidden: whether a count hangs on the target's values in a way that the tape does not show.
        loose: calls with what the model made in which a number is no more than a factor or a constant.
        zeros: the arguments, by call, that are added to a part of the loss and must stay zero.
        tape: what it computes of the target alone.
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
    count_place: int | None = None
    complete: bool = False
    reads: bool = False
    opaque: bool = False
    hidden: bool = False
    loose: set[int] = field(default_factory=set)
    zeros: dict[int, list[int]] = field(default_factory=dict)
    shared_places: dict[int, dict[int, int | None]] = field(default_factory=dict)
    tape: Tape = field(default_factory=Tape)

    @property
    def by_values(self) -> bool:
        """Whether weights may hang on the target's values, and not on shapes alone."""
        return self.hidden or self.reads or not self.tape.evident or any(term.classes for term in self.terms)

    def for_target(self, target: Any) -> Record | None:
        """What would be seen for another target of the same shapes; None where only another look can tell."""
        if not self.by_values and not self.shared:
            return self
        if self.hidden or not self.tape.whole:
            return None
        values = self.tape.play(target)
        places = self.shared_places
        return replace(
            self,
            terms=[term.of_values(values) for term in self.terms],
            shared={
                call: {index: values[place] for index, place in found.items() if place is not None}
                for call, found in places.items()
            },
        )

    @property
    def lasts(self) -> bool:
        """Whether it holds for other values as long as the calls are the same.

        Of what is read as a number it does where the mini-batch's is read, in place of the micro-batch's.
        """
        return self.complete and not self.opaque and not (self.reads and self.keeps_reads)

    def count_for(self, target: Any) -> float | None:
        """Of a loss that returns its sum and its count, the count for another target of the same shapes."""
        if self.count_place is None or not self.tape.whole:
            return None
        return float(self.tape.play(target)[self.count_place])

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
            if name in READS and self._keeps_reads:
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
