"""Layers that raise an error in the call chosen by the test."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn


class Trouble(Exception):
    """An exception that cannot be constructed from its message alone."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"trouble {code}")
        self.code, self.reason = code, reason


class Fuse(nn.Module):
    """A layer that returns its input, and raises in the forward or backward of call ``at`` if it is armed.

    ``where`` is ``"forward"``, ``"function"`` for the backward of a function, or ``"tensor hook"``.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.at: int | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        call, self.calls = self.calls, self.calls + 1
        if self.where == "forward":
            self.burn(call)
            return x * 1
        if self.where == "function":
            return Burning.apply(x, self, call)
        y = x * 1
        y.register_hook(lambda gradient: self.burn(call))
        return y

    def burn(self, call: int) -> None:
        if call == self.at:
            raise Trouble(call, reason=self.where)


class Burning(torch.autograd.Function):
    """Asks the fuse in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse, call: int) -> Tensor:
        ctx.fuse, ctx.call = fuse, call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.fuse.burn(ctx.call)
        return gradients[0], None, None


def notes(error: BaseException) -> str:
    """Return the notes of an exception, one line each."""
    return "\n".join(error.__notes__)


def text_of_traceback(error: BaseException) -> str:
    """As Python prints it."""
    return "".join(traceback.format_exception(error))
