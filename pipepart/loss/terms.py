"""The terms of the loss of a micro-batch: scalars, each with the count that it is divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Targets = Sequence[Sequence[Any]]  # the leaves of each micro-batch's target
Replay = Callable[[Targets], Sequence[Any]]  # computes the counts of all micro-batches of a step


@dataclass(slots=True, eq=False)
class Term:
    """One term of the loss of a micro-batch. It is divided by the sum of the counts of all micro-batches.

    Attributes:
        tensor: its value, without dimensions, and the graph behind it.
        coefficient: the number that it is multiplied by.
        divisor: the count of this micro-batch, a number or a tensor without dimensions; None for a sum.
        divided: whether ``tensor`` has been divided by ``divisor``.
        least: what the loss divides by if the sum of the counts is smaller, as in ``count.clamp(min=1)``.
        trains: whether ``tensor`` has, or had, a graph.
    """

    tensor: Tensor
    coefficient: float | Tensor = 1.0
    divisor: float | Tensor | None = None
    divided: bool = False
    least: float = -math.inf
    trains: bool = False

    @property
    def empty(self) -> bool | Tensor:
        """True if the term is a mean over no elements, which is NaN."""
        return self.divided and self.divisor is not None and self.divisor == 0

    def bounded(self, total: float | Tensor) -> float | Tensor:
        """Return the larger of the total count and :attr:`least`."""
        return total.clamp(min=self.least) if isinstance(total, Tensor) else max(total, self.least)

    def share_of(self, total: float | Tensor) -> float | Tensor:
        """Return the share of this micro-batch in the total count of the mini-batch; 1 for a sum."""
        return 1.0 if self.divisor is None else self.divisor / total if total else 0.0

    def weight(self, total: float | Tensor) -> float | Tensor:
        """Return the gradient of the mini-batch's loss at ``tensor``, for the total count ``total``."""
        divisor = self.divisor
        if divisor is None:
            return self.coefficient
        share = divisor if self.divided else 1.0
        if type(share) is not float or type(total) is not float:
            if isinstance(share, Tensor):
                share = share.double()  # torch divides an integer by a number in float32
            weight = self.coefficient * share / total
            # If no target counts, torch's mean has a zero gradient; a hand-written sum / count keeps its NaN.
            return torch.where(torch.as_tensor(self.empty), 0.0, weight) if self.divided else weight
        if not share:
            return 0.0
        return self.coefficient * share / total if total else float("inf")


@dataclass(slots=True, eq=False)
class MicroBatchLoss:
    """The loss of one micro-batch: a sum of terms.

    Attributes:
        value: what the loss function returned, for a report.
        terms: what it is made of. Gradients enter at their tensors.
        shift: a number that is added once per mini-batch.
        key: equal for micro-batches whose losses were computed alike.
        replays: for each term, what computes its counts for all micro-batches; None where they depend on more than
            the targets. Empty for a copy without a graph.
    """

    value: Tensor
    terms: tuple[Term, ...]
    shift: float | Tensor = 0.0
    key: Hashable = None
    replays: tuple[Replay | None, ...] = ()

    def drop_graph(self, compact: bool = True) -> list[Tensor]:
        """Replace its tensors by copies that do not keep the graph alive, and note whether they had one.

        Args:
            compact: whether the copies are made :func:`without_slack`.

        Returns:
            The tensors from which the backward starts, with their graph.
        """
        copied = _compacted if compact else Tensor.detach
        roots = []
        value = self.value
        self.value = kept = copied(value)
        for term in self.terms:  # the loss is often its only term
            tensor = term.tensor
            if tensor.requires_grad:
                term.trains = True
                roots.append(tensor)
            term.tensor = kept if tensor is value else copied(tensor)
        self.replays = ()
        return roots

    @property
    def has_slack(self) -> bool:
        """Whether the storage of one of its tensors holds more than the scalar."""
        return any(map(_has_slack, (self.value, *[term.tensor for term in self.terms])))

    def on(self, device: torch.device) -> MicroBatchLoss:
        """Return a copy without graph on a device; in host memory it can be sent to other processes."""

        def moved(number: Any) -> Any:
            return number.to(device) if isinstance(number, Tensor) else number

        terms = [
            Term(
                term.tensor.to(device),
                moved(term.coefficient),
                moved(term.divisor),
                term.divided,
                term.least,
                term.trains,
            )
            for term in self.terms
        ]
        return MicroBatchLoss(moved(self.value), tuple(terms), moved(self.shift))  # the key holds identities


def whole_of(terms: Sequence[Term], total: float | Tensor, home: torch.device) -> Tensor:
    """Return the value of a term for the mini-batch, without micro-batches whose count is zero.

    Args:
        terms: of the micro-batches, in their order.
        total: the count of the mini-batch.
        home: the device of the result.
    """
    tensors = [term.tensor for term in terms]
    values = torch.stack([each if each.device == home else each.to(home) for each in tensors])
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    weights = [term.weight(total) for term in terms]
    row = _row(weights, home, values.dtype)
    if not _has_tensors(weights) and 0.0 not in weights:  # none is empty
        return (values * row).sum()
    empty = _row([term.empty for term in terms], home, torch.bool)
    whole = (values.masked_fill(empty, 0.0) * row).sum()
    return torch.where(empty.all(), values[0], whole)  # nothing counts at all: as torch has it


def _row(numbers: Sequence[float | Tensor], home: torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor, copied at once where they are on the host."""
    if _has_tensors(numbers):
        return torch.stack([torch.as_tensor(number).to(home, dtype) for number in numbers])
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(home, non_blocking=True)


def _has_tensors(numbers: Sequence[float | Tensor]) -> bool:
    return any(issubclass(kind, Tensor) for kind in {*map(type, numbers)})


def total_of(counts: Sequence[float | Tensor]) -> float | Tensor:
    """Return the sum of counts, on the device of the first that is a tensor."""
    if not _has_tensors(counts):
        return float(sum(counts))
    home = next(count.device for count in counts if isinstance(count, Tensor))
    return torch.stack([torch.as_tensor(c, dtype=torch.double).to(home) for c in counts]).sum()


def on_host(count: Tensor) -> float | Tensor:
    """Return a count on the CPU as a float, and any other count unchanged, so that the host does not wait."""
    return float(count) if count.device.type == "cpu" else count


def without_slack(value: Tensor) -> Tensor:
    """Return a scalar whose storage holds only this scalar.

    torch computes some means, such as that of ``MSELoss``, in the memory of all samples, of which one number is left.
    """
    return value.clone() if _has_slack(value) else value


def _compacted(value: Tensor) -> Tensor:
    return without_slack(value.detach())


def _has_slack(value: Tensor) -> bool:
    return value.untyped_storage().nbytes() > value.nbytes
