"""The numbers of one training step, and how much those of two trainings differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Tensors = Mapping[Any, Tensor | None]

# The error of a tensor is relative to its own norm, or to this part of the norm of all tensors if that is larger: a
# gradient that is zero except for rounding would otherwise have a large error.
_SMALL = 1e-2


@dataclass(frozen=True)
class Numbers:
    """The loss and the gradients of one step, and the parameters and buffers after the optimizer's step."""

    loss: Tensor
    gradients: Tensors
    parameters: Tensors
    buffers: Tensors

    @classmethod
    def of(cls, loss: Tensor, gradients: Mapping[str, Tensor | None], model: nn.Module) -> Numbers:
        """Copy the numbers of a step that has ended."""
        return cls(
            loss.detach().cpu(),
            gradients,
            {name: copied(parameter) for name, parameter in model.named_parameters()},
            {name: copied(buffer) for name, buffer in model.named_buffers()},
        )

    @property
    def parts(self) -> dict[str, Tensors]:
        """Each kind of numbers by its name."""
        return {
            "losses": {"": self.loss},
            "gradients": self.gradients,
            "parameters": self.parameters,
            "buffers": self.buffers,
        }


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copy each parameter's gradient; None if it has none."""
    return {
        name: None if parameter.grad is None else copied(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def copied(tensor: Tensor) -> Tensor:
    """A dense copy on the CPU."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.cpu().clone()


def largest_error(ours: Tensors, theirs: Tensors) -> float:
    """The largest relative error of any tensor, by norm.

    0 if all tensors are equal bit for bit, where NaN equals NaN. Infinite if only one side has a tensor or a finite
    number.
    """
    if ours.keys() != theirs.keys():
        return math.inf
    floor = _floor(theirs)
    return max((_error(ours[name], theirs[name], floor) for name in theirs), default=0.0)


def different(ours: Tensors, theirs: Tensors, allowed: float) -> list[Any]:
    """The names of the tensors whose relative error is larger than ``allowed``."""
    floor = _floor(theirs)
    names = [*theirs, *(name for name in ours if name not in theirs)]
    return [name for name in names if _error(ours.get(name), theirs.get(name), floor) > allowed]


def errors(ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> dict[str, float | None]:
    """The largest error of any step for each kind of numbers; None if there are none of a kind."""
    found: dict[str, float | None] = {}
    for kind, first in theirs[0].parts.items():
        some = any(tensor is not None for tensor in first.values())
        steps = zip(ours, theirs, strict=True)
        found[kind] = max(largest_error(a.parts[kind], b.parts[kind]) for a, b in steps) if some else None
    return found


def error_of_steps(ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> float:
    """The largest error of any loss or gradient."""
    found = errors(ours, theirs)
    return max(found["losses"] or 0.0, found["gradients"] or 0.0)


def first_different_step(ours: Sequence[Numbers], theirs: Sequence[Numbers], allowed: float) -> int | None:
    """The first step in which anything differs by more than ``allowed``."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if max(error or 0.0 for error in errors([mine], [other]).values()) > allowed:
            return step
    return None


def _floor(tensors: Tensors) -> float:
    return _SMALL * math.hypot(*(_norm(tensor) for tensor in tensors.values() if tensor is not None), 0.0)


def _error(ours: Tensor | None, theirs: Tensor | None, floor: float) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if ours.equal(theirs) or bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()):
        return 0.0
    size = max(_norm(ours), _norm(theirs), floor)
    off = _norm(_wide(ours) - _wide(theirs))
    # The difference of two neighbouring numbers may be 0 in the norm; it must not count as bit for bit.
    return max(off / size, math.ulp(0.0)) if math.isfinite(off) and math.isfinite(size) else math.inf


def _norm(tensor: Tensor) -> float:
    return float(_wide(tensor).norm())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
