"""Calls a loss that reads sizes for the number of samples of the whole mini-batch, on tensors without data.

A number that the loss computes from sizes is seen by its value: 2 for a micro-batch, and 8 for a mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd.own_copy import tensors
from ..capture import restored
from ..capture.recorded.recording.tables import SIZES
from ..generators import draws_undone
from .buffers import call_with_buffers
from .tape import Call, Ref, Tape


class SizedTape(Tape):
    """Records the calls of a loss on tensors of the size of the mini-batch, which must be those of a micro-batch.

    Args:
        part: the tape of the micro-batch.
        wholes: tensors without data in the place of those of the batch.

    Attributes:
        result: the number of the loss; None if it makes other calls, or does not work without data.
    """

    def __init__(self, part: Tape, wholes: Sequence[Tensor]) -> None:
        super().__init__(part.originals)
        self.result: int | None = None
        self._part, self._wholes = part, wholes
        self._copies: dict[int, Tensor] = {}
        for whole in wholes:
            self.give(whole)

    def call(
        self,
        function: Callable[..., Any],
        values: tuple[Any, ...],
        buffers: dict[str, tuple[Tensor, Tensor]],
    ) -> None:
        """Call a loss with its arguments in the micro-batch. What it changes in a loss module is put back.

        Args:
            function, values, buffers: as for :func:`~.buffers.call_with_buffers`.
        """
        replaced = {id(self._part.value(number)): whole for number, whole in enumerate(self._wholes)}
        values = pytree.tree_map_only(Tensor, lambda leaf: replaced.get(id(leaf), leaf), values)
        kept = restored(function) if isinstance(function, nn.Module) else nullcontext()
        try:
            with draws_undone(), kept, torch.no_grad(), self:
                loss = call_with_buffers(function, values, buffers)
        except (_OtherCallError, Exception):
            return
        loss = loss[0] if isinstance(loss, tuple | list) else loss
        of_loss = self.number_of(loss) if isinstance(loss, Tensor) else None
        self.result = of_loss if isinstance(of_loss, int) else None

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = len(self.calls)
        part = self._part.calls[place] if place < len(self._part.calls) else None
        if part is None or part.function != call.function:
            raise _OtherCallError
        if call.name in SIZES:
            return call.function(*args, **kwargs)
        if not part.numbers:  # it reads a value, which there is none of here
            return self._part.answers[place]
        if part.in_place and type(part.leaves[0]) is not Ref:  # into a tensor of the user's
            raise _OtherCallError
        if any(tensor.is_meta for tensor in tensors((args, kwargs))):
            args, kwargs = pytree.tree_map_only(Tensor, self._without_data, (args, kwargs))
        index = args[1] if call.name in ("__getitem__", "masked_select") else None
        if isinstance(index, Tensor) and index.dtype is torch.bool:  # it picks all
            return args[0].new_empty((index.numel(), *args[0].shape[index.dim() :]))
        return call.function(*args, **kwargs)

    def _without_data(self, leaf: Tensor) -> Tensor:
        return leaf if leaf.is_meta else self._copies.setdefault(id(leaf), without_data(leaf, leaf.shape))


class _OtherCallError(BaseException):
    """The loss makes another call than for a micro-batch."""


def without_data(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of the kind of another one on the meta device."""
    return torch.empty(shape, dtype=tensor.dtype, device="meta")
