"""Share: the values for the mini-batch's loss that one rank sends to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Share(NamedTuple):
    """What one rank knows of the loss of a mini-batch.

    Attributes:
        added: losses that layers of its stages added.
        total: of the last stage's rank: the loss without them.
        correction: the factor for the gradients.
        certain: whether that is 1, whatever the outputs are.
        trains: whether a gradient of any loss has gone into the model.
        refusal: why the gradients of the mini-batch are not right, if they are not.
    """

    added: Mapping[tuple[int, int], list[tuple[Tensor, float, bool]]]
    total: Tensor | None = None
    correction: float = 1.0
    certain: bool = True
    trains: bool = False
    refusal: str = ""

    def as_plain(self) -> list[Any]:
        """Return it as values that JSON has."""
        added = [
            [key, [[scalar_as_plain(loss), *rest] for loss, *rest in losses]]
            for key, losses in self.added.items()
        ]
        total = None if self.total is None else scalar_as_plain(self.total)
        return [added, total, *self[2:]]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Share:
        """Return what :meth:`as_plain` was given, on the host."""
        added, total, *rest = plain
        found = {
            (stage, micro_batch): [(scalar_from_plain(loss), weight, graph) for loss, weight, graph in losses]
            for (stage, micro_batch), losses in added
        }
        return cls(found, None if total is None else scalar_from_plain(total), *rest)


def scalar_as_plain(scalar: Tensor) -> tuple[float, str]:
    """Return the value and the type of a tensor without dimensions."""
    return scalar.item(), str(scalar.dtype).removeprefix("torch.")


def scalar_from_plain(plain: tuple[float, str]) -> Tensor:
    """Return the tensor that :func:`scalar_as_plain` was given, on the host."""
    value, dtype = plain
    return torch.tensor(value, dtype=getattr(torch, dtype), device="cpu")
