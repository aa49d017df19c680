"""Repeats the calls of a loss for the number of samples of the whole mini-batch, on tensors without data.

A tensor of a micro-batch of 2 samples is ``[2, 5]``, and the same call gives ``[8, 5]`` for a mini-batch of 8:
dimension 0 holds the samples. A loss that reads sizes is itself called in this way. A number that it computes from
them is seen by its value, 2 in one call and 8 in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd.own_copy import tensors
from ..capture import restored
from ..capture.recorded.recording.tables import SIZES, words
from ..generators import draws_undone
from .buffers import call_with_buffers
from .tape import Call, Ref, Tape, mapped

_MOVES = words("to cpu cuda type_as")
ELEMENTWISE = words(
    "abs absolute neg negative sign exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow float_power sin "
    "cos tan atan atan2 sinh cosh tanh sigmoid logit logsigmoid softplus softsign relu relu6 leaky_relu elu "
    "selu gelu silu mish hardtanh erf xlogy clamp clip clamp_min clamp_max maximum minimum add sub subtract "
    "rsub mul multiply div divide true_divide floor_divide remainder reciprocal round floor ceil eq ne lt le "
    "gt ge less greater less_equal greater_equal not_equal logical_and logical_or logical_xor logical_not "
    "bitwise_and bitwise_or bitwise_not isnan isinf isfinite nan_to_num where masked_fill lerp logaddexp hypot "
    "float double half bfloat16 long int bool type to type_as cpu cuda clone contiguous detach zeros_like ones_like "
    "full_like expand_as __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __rsub__ "
    "__rdiv__ __rpow__ __radd__ __rmul__ __truediv__ __rtruediv__ __pow__"
)
"""Functions whose results have the shape that their arguments broadcast to."""


class WholeTape(Tape):
    """Records the calls of a loss on tensors of the size of the mini-batch, which must be those of a micro-batch.

    Args:
        part: the tape of the micro-batch.
        wholes: tensors without data in the place of those of the batch, by number.

    Attributes:
        failed: the places of calls that do not work without data.
        result: the number of the loss; None if another call was made, or the loss is none of the results.
    """

    def __init__(self, part: Tape, wholes: Mapping[int, Tensor]) -> None:
        super().__init__(part.originals)
        self.failed: set[int] = set()
        self.result: int | None = None
        self._part, self._wholes = part, wholes
        self._copies: dict[int, Tensor] = {}
        for number in sorted(wholes):
            self.give(wholes[number])

    def repeat(self, result: int) -> None:
        """Repeat the calls of the micro-batch, of which the loss is one result."""
        with draws_undone(), torch.no_grad():
            for call in self._part.calls:
                leaves = [self.value(leaf.number) if type(leaf) is Ref else leaf for leaf in call.leaves]
                args, kwargs = call.filled(leaves)
                made = self._run(call, args, kwargs) if call.numbers else ()
                self.calls.append(call)
                for tensor in args[:1] if call.name == "__setitem__" else tensors(made):
                    self._note(tensor)
        self.result = result

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
        replaced = {id(self._part.value(number)): whole for number, whole in self._wholes.items()}
        values = pytree.tree_map_only(Tensor, lambda leaf: replaced.get(id(leaf), leaf), values)
        kept = restored(function) if isinstance(function, nn.Module) else nullcontext()
        try:
            with draws_undone(), kept, torch.no_grad(), self:
                loss = call_with_buffers(function, values, buffers)
        except (_OtherCallError, Exception):  # what it calls may not work without data
            return
        found = self.number_of(loss) if isinstance(loss, Tensor) else None
        self.result = found if isinstance(found, int) else None

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = len(self.calls)
        part = self._part.calls[place] if place < len(self._part.calls) else None
        if part is None or part.name != call.name or len(part.leaves) != len(call.leaves):
            raise _OtherCallError
        if call.name in SIZES:
            return call.function(*args, **kwargs)
        if not part.numbers:  # it reads a value, which there is none of here
            return self._part.answers[place]
        results = [self._part.value(number) for number in part.numbers]
        try:
            args, kwargs = mapped((args, kwargs), self._without_data)
            made = _on_meta(call, args, kwargs, results)
            if call.name == "__setitem__" or len(tensors(made)) == len(results):
                return made
        except Exception:  # the meta device has not all functions
            pass
        self.failed.add(place)
        stand_ins = [torch.empty_like(result, device="meta") for result in results]
        return stand_ins[0] if len(stand_ins) == 1 else stand_ins

    def _without_data(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_meta:
            return leaf
        return self._copies.setdefault(id(leaf), leaf.detach().to("meta"))


class _OtherCallError(BaseException):
    """The loss makes another call than for a micro-batch."""


def _on_meta(call: Call, args: Any, kwargs: dict[str, Any], results: Sequence[Tensor]) -> Any:
    """Repeat a call on tensors without data. A mask picks all elements.

    Args:
        call: the call.
        args, kwargs: its arguments, with tensors on the meta device.
        results: of the call in a micro-batch.
    """
    if call.name in _MOVES:
        return args[0].to(dtype=results[0].dtype)
    if call.name in ELEMENTWISE:  # many of torch's own kernels without data are slow
        shape = np.broadcast_shapes(*[tensor.shape for tensor in tensors((args, kwargs))])
        if not call.in_place:
            return torch.empty(shape, dtype=results[0].dtype, device="meta")
        if shape != args[0].shape:
            raise RuntimeError("the tensor does not have the shape of what is written into it")
        return args[0]
    if call.name in ("__getitem__", "masked_select") and isinstance(args[1], Tensor):
        tensor, index = args
        if index.dtype is torch.bool:
            return tensor.new_empty((index.numel(), *tensor.shape[index.dim() :]))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    made = call.function(*args, **kwargs)
    if call.name == "__setitem__" or all(tensor.is_meta for tensor in tensors(made)):
        return made
    return mapped(made, lambda leaf: leaf.to("meta"))
