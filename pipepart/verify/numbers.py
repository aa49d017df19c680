"""The numbers of one training step, and how far those of two trainings are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Tensors = Mapping[Any, Tensor | None]

# A tensor that is small beside the others, as a gradient that is zero but for rounding, is measured by their size.
_SMALL = 1e-2


@dataclass(frozen=True)
class Numbers:
    """One step: its loss and gradients, and the state after the optimizer."""

    loss: Tensor
    gradients: Tensors
    parameters: Tensors
    buffers: Tensors

    @property
    def parts(self) -> dict[str, Tensors]:
        """Each kind by its name."""
        return {
            "losses": {"": self.loss},
            "gradients": self.gradients,
            "parameters": self.parameters,
            "buffers": self.buffers,
        }


def gradients_of(model: nn.Module) -> Tensors:
    """A copy of each gradient, None where there is none."""
    return {
        name: None if parameter.grad is None else copied(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def parameters_of(model: nn.Module) -> Tensors:
    """A copy of each parameter."""
    return {name: copied(parameter) for name, parameter in model.named_parameters()}


def buffers_of(model: nn.Module) -> Tensors:
    """A copy of each buffer."""
    return {name: copied(buffer) for name, buffer in model.named_buffers()}


def copied(tensor: Tensor) -> Tensor:
    """A dense copy of the values on the CPU."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.cpu().clone()


def largest_error(ours: Tensors, theirs: Tensors) -> float:
    """The largest relative error of any tensor, by norm; 0 if all are the same bit for bit, NaN being NaN.

    Infinite where one side has a tensor, or a number that is finite, and the other has not.
    """
    if ours.keys() != theirs.keys():
        return math.inf
    floor = _SMALL * math.hypot(*(_norm(tensor) for tensor in theirs.values() if tensor is not None), 0.0)
    return max((_error(ours[name], theirs[name], floor) for name in theirs), default=0.0)


def different(ours: Tensors, theirs: Tensors, allowed: float) -> list[Any]:
    """The names whose tensors differ by more than ``allowed``, the sizes of all taken into account."""
    floor = _SMALL * math.hypot(*(_norm(tensor) for tensor in theirs.values() if tensor is not None), 0.0)
    names = [*theirs, *(name for name in ours if name not in theirs)]
    return [name for name in names if _error(ours.get(name), theirs.get(name), floor) > allowed]


def errors(ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> dict[str, float | None]:
    """Of each kind the largest error of any step; None where there is nothing of that kind."""
    found: dict[str, float | None] = {}
    for kind, first in theirs[0].parts.items():
        some = any(tensor is not None for tensor in first.values())
        steps = zip(ours, theirs, strict=True)
        found[kind] = max(largest_error(a.parts[kind], b.parts[kind]) for a, b in steps) if some else None
    return found


def _error(ours: Tensor | None, theirs: Tensor | None, floor: float) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if ours.equal(theirs) or bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()):
        return 0.0
    size = max(_norm(ours), _norm(theirs), floor)
    off = _norm(_wide(ours) - _wide(theirs))
    # The difference of two numbers that are next to each other may vanish in a norm, and is there all the same.
    return max(off / size, math.ulp(0.0)) if math.isfinite(off) and math.isfinite(size) else math.inf


def _norm(tensor: Tensor) -> float:
    return float(_wide(tensor).norm())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
