"""The terms of a micro-batch's loss: scalars, and what each is divided by in the loss of the mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Replay = Callable[[int], Any]  # computes a value for another micro-batch of the step, by its index


class Count(NamedTuple):
    """The part of a micro-batch in what a term is divided by, which is the sum over all micro-batches.

    Attributes:
        value: a number, or a tensor without dimensions.
        replay: gives the part of any micro-batch from its target; None where it depends on more.
    """

    value: float | Tensor
    replay: Replay | None = None


class Term(NamedTuple):
    """A part of the loss of a micro-batch.

    Attributes:
        tensor: its value, without dimensions, and the graph behind it.
        coefficient: the number that it is multiplied by.
        divisor: what it is divided by; None for a sum, which is not.
        divided: whether ``tensor`` has been divided by the part of the count of its micro-batch.
    """

    tensor: Tensor
    coefficient: float | Tensor = 1.0
    divisor: Count | None = None
    divided: bool = False

    @property
    def empty(self) -> bool | Tensor:
        """Whether it is a mean over nothing, which is not a number."""
        return self.divided and self.divisor is not None and self.divisor.value == 0

    def weight(self, total: float | Tensor) -> float | Tensor:
        """Return the gradient at ``tensor``, for the total count of the mini-batch."""
        if self.divisor is None:
            return self.coefficient
        share = self.divisor.value if self.divided else 1.0
        if isinstance(share, Tensor) or isinstance(total, Tensor):
            weight = self.coefficient * share / total
            # Where nothing counts, a mean of torch has no gradient; a quotient has what its division gives.
            return torch.where(torch.as_tensor(self.empty), 0.0, weight) if self.divided else weight
        if self.empty:
            return 0.0
        return self.coefficient * share / total if total else float("inf")


@dataclass(frozen=True, slots=True)
class Terms:
    """A sum of terms and a number, ``shift``, which counts once in the mini-batch."""

    terms: tuple[Term, ...]
    shift: float | Tensor = 0.0

    def plus(self, other: Terms) -> Terms:
        """Return the sum of both."""
        return Terms((*self.terms, *other.terms), self.shift + other.shift)

    def scaled(self, scale: Callable[[Any], Any]) -> Terms:
        """Return the sum with ``scale``, a product with or a quotient by a constant, applied to all parts."""
        terms = tuple(term._replace(coefficient=scale(term.coefficient)) for term in self.terms)
        return Terms(terms, scale(self.shift))

    def detached(self) -> Terms:
        """Return the values without their gradients."""
        return Terms(tuple(term._replace(tensor=term.tensor.detach()) for term in self.terms), self.shift)


def whole_of(terms: Sequence[Term], total: float | Tensor, home: torch.device) -> Tensor:
    """Return the value of a term in the mini-batch; micro-batches in which nothing counts are left out.

    Args:
        terms: of the micro-batches, in their order.
        total: the count of the mini-batch.
        home: the device of the result.
    """
    values, weights = [], []
    for term in terms:
        value, empty = term.tensor.detach().to(home), term.empty
        if isinstance(empty, Tensor):
            value = torch.where(empty.to(home), torch.zeros_like(value), value)
        if isinstance(empty, Tensor) or not empty:
            values.append(value.to(torch.promote_types(value.dtype, torch.float32)))
            weights.append(term.weight(total))
    if not values or (isinstance(total, Tensor) and bool(total == 0)):
        return terms[0].tensor.detach().to(home)  # as torch has it where nothing counts at all
    stacked = torch.stack(values)
    if any(isinstance(weight, Tensor) for weight in weights):
        return (stacked * torch.stack([torch.as_tensor(w).to(home, stacked.dtype) for w in weights])).sum()
    return (
        stacked * torch.tensor(weights, dtype=stacked.dtype, device="cpu").to(home, non_blocking=True)
    ).sum()


def total_of(counts: Sequence[float | Tensor]) -> float | Tensor:
    """Return the sum of counts, on the device of the first that is a tensor."""
    home = next((count.device for count in counts if isinstance(count, Tensor)), None)
    if home is None:
        return float(sum(counts))
    return torch.stack([torch.as_tensor(c, dtype=torch.double).to(home) for c in counts]).sum()


def on_host(count: Tensor) -> float | Tensor:
    """Return a count as a number where that takes no wait for a device."""
    return float(count) if count.device.type == "cpu" else count
