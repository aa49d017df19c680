"""The terms of a micro-batch's loss: scalars, and what each is divided by in the loss of the mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Predict = Callable[[Any], float | Tensor]


class Count(NamedTuple):
    """What a term is divided by: ``max(scale * total + shift, floor)``, of the total of all micro-batches.

    Attributes:
        value: the part of this micro-batch, a number or a tensor without dimensions.
        predict: gives the part of another micro-batch from its target; None where it depends on more.
        steady: whether it is known to be in proportion to the micro-batch's size.
        whole: the total of all micro-batches, where it is known from the start.
    """

    value: float | Tensor
    scale: float = 1.0
    shift: float = 0.0
    floor: float | None = None
    predict: Predict | None = None
    steady: bool = False
    whole: float | None = None

    def of(self, total: float | Tensor) -> float | Tensor:
        """What the term of the mini-batch is divided by."""
        found = total * self.scale + self.shift if self.scale != 1.0 or self.shift else total
        if self.floor is None:
            return found
        return found.clamp(min=self.floor) if isinstance(found, Tensor) else max(found, self.floor)


class Term(NamedTuple):
    """A part of the loss of a micro-batch.

    Attributes:
        tensor: its value, without dimensions, and the graph behind it.
        coefficient: the number that it is multiplied by.
        divisor: what it is divided by; None for a sum, which is not.
        divided: whether ``tensor`` has been divided by the part of the count of its micro-batch.
    """

    tensor: Tensor
    coefficient: float = 1.0
    divisor: Count | None = None
    divided: bool = False

    def weight(self, total: float | Tensor) -> float | Tensor:
        """What the gradient at ``tensor`` is, for the total count of the mini-batch."""
        if self.divisor is None:
            return self.coefficient
        share = self.divisor.value if self.divided else 1.0
        whole = self.divisor.of(total)
        if isinstance(share, Tensor) or isinstance(whole, Tensor):
            weight = self.coefficient * share / whole
            # Where nothing counts, a mean of torch has no gradient; a quotient has what its division gives.
            return torch.where(torch.as_tensor(share) == 0, 0.0, weight) if self.divided else weight
        if self.divided and not share:
            return 0.0
        return self.coefficient * share / whole if whole else float("inf")


def whole_of(terms: Sequence[Term], total: float | Tensor, home: torch.device) -> Tensor:
    """The value of a term in the mini-batch; micro-batches in which nothing counts are left out.

    Args:
        terms: of the micro-batches, in their order.
        total: the count of the mini-batch.
        home: the device of the result.
    """
    values, weights = [], []
    for term in terms:
        value = term.tensor.detach().to(home)
        share = term.divisor.value if term.divisor is not None and term.divided else 1.0
        if isinstance(share, Tensor):
            value = torch.where(share.to(home) == 0, torch.zeros_like(value), value)
        if isinstance(share, Tensor) or share:
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
    """The sum of counts, on the device of the first that is a tensor."""
    home = next((count.device for count in counts if isinstance(count, Tensor)), None)
    if home is None:
        return float(sum(counts))
    return torch.stack([torch.as_tensor(c, dtype=torch.double).to(home) for c in counts]).sum()


def on_host(count: Tensor) -> float | Tensor:
    """A count as a number where that takes no wait for a device."""
    return float(count) if count.device.type == "cpu" else count
