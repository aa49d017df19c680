"""A function of autograd whose value and gradient are functions that a test chooses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gradient: Callable[[Tensor], Any], value: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.gradient = gradient
        return value(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, None, None]:
        return ctx.gradient(gradients[0]), None, None


def with_gradient(
    x: Tensor, gradient: Callable[[Tensor], Any], value: Callable[[Tensor], Tensor] = Tensor.clone
) -> Tensor:
    """Return ``value(x)``, whose backward is ``gradient`` of the output's gradient; by default a copy of x."""
    return _Given.apply(x, gradient, value)


def calls_in_backward(x: Tensor, function: Callable[[], object]) -> Tensor:
    """Return a copy, whose backward calls ``function`` first."""
    return with_gradient(x, lambda gradient: (function(), gradient)[1])
