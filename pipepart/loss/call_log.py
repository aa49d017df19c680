"""Logs the torch calls of a loss, to check that it makes the same calls for another micro-batch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..autograd.in_place import version
from ..autograd.own_copy import tensors


class CallLog(TorchFunctionMode):
    """Logs the names, numbers and constant tensors of calls, within its ``with`` block or by :meth:`note`.

    Args:
        given: the output and the target of a micro-batch, whose tensors are no constants.

    Attributes:
        calls: one entry a call: the name, the arguments that are neither tensors nor containers, and the constants.
    """

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Hashable, ...]]] = []
        self._made = {id(tensor): tensor for tensor in tensors(given)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.note(func, pytree.tree_leaves((args, kwargs)), result)
        return result

    def note(self, func: Any, leaves: list[Any], result: Any) -> None:
        """Log a call with a flat list of its arguments."""
        self.calls.append((getattr(func, "__name__", ""), tuple([self._token(leaf) for leaf in leaves])))
        for made in tensors(result):
            self._made[id(made)] = made  # held, so that no other gets its identity

    def _token(self, leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return None if id(leaf) in self._made else (id(leaf), version(leaf))
        if isinstance(leaf, slice):
            return "slice", *map(self._token, (leaf.start, leaf.stop, leaf.step))
        plain = isinstance(leaf, int | float | str | torch.dtype | torch.device | type(None))
        return leaf if plain else type(leaf).__name__
