"""A function of autograd that calls another one in its backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CallsInBackward(torch.autograd.Function):
    """Copies its input; its backward calls ``function`` first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], object]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradients[0], None
