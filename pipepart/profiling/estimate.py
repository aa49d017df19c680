"""Estimates the seconds of each layer from a roofline, without running a kernel.

::

    layers on the meta device ──▶ a pass: torch's operations of each layer ──▶ flops, bytes ──Roofline──▶ seconds
                                  forward │ backward for inputs │ for weights
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..autograd import graph_cut
from ..autograd.dispatch_mode import DispatchMode, on_shards
from ..autograd.sparse import dense_tensors
from ..autograd.split_backward import WeightGradients
from .costs import Timing
from .layer_pass import LayerPass, Observer
from .memory import collective_kind
from .roofline import Roofline, Work
from .timing import LayerTimes

_aten = torch.ops.aten
_PARTS = ("forward", "backward_input", "backward_weight")
WorkTable = dict[tuple[str, int], list[Work]]  # key: part, index of the layer (of the loss: number of layers)


def estimate_times(
    chain: LayerPass, micro_batch: Any, micro_batches: int, roofline: Roofline
) -> list[LayerTimes]:
    """Estimate the times of each layer of a chain on the meta device, then of its loss if there is one.

    Args:
        chain: the layers with their loss.
        micro_batch: the input of the first layer.
        micro_batches: number of micro-batches of a step. The time of a backward is the mean over them.
        roofline: the speed of the device.
    """
    chain.zero_grad()
    first, later = WorkOfLayers(), WorkOfLayers()
    for counted in (first, later):  # the first micro-batch of a step has no gradients to add to
        with counted:
            chain.run(micro_batch, counted, split=True)

    def timing(part: str, index: int) -> Timing:
        first_seconds, later_seconds = (
            roofline.seconds(counted.work[part, index]) for counted in (first, later)
        )
        return Timing(seconds=(first_seconds + (micro_batches - 1) * later_seconds) / micro_batches)

    return [
        LayerTimes(*(timing(part, index) for part in _PARTS), split_seconds=0.0)
        for index in range(len(chain.calls))
    ]


class WorkOfLayers(DispatchMode, Observer):
    """Lists the operations of each part of each layer while a pass with a split backward runs.

    Attributes:
        work: the operations of each part of each layer, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work: WorkTable = defaultdict(list)
        self._into: list[Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if on_shards(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        work = work_of(func, args, kwargs, result)
        if work is not None:
            self._into.append(work)
        return result

    def forward_starts(self, index: int, value: Any) -> None:
        self._into = self.work["forward", index]

    def forward_ends(self, index: int, output: Any) -> None:
        self._into = []  # discards operations of the pass between layers

    def backward_starts(self, index: int, gradients: graph_cut.Gradients) -> None:
        self._into = self.work["backward_input", index]

    def input_gradients_done(self, index: int, deferred: WeightGradients | None) -> None:
        self._into = self.work["backward_weight", index]

    def backward_ends(self, index: int) -> None:
        self._into = []


def work_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work | None:
    """Return the work of an operation called under a ``TorchDispatchMode``; None if it runs no kernel, like a view.

    Counts the floating point operations that ``torch.utils.flop_counter`` knows, and those of attention and grouped
    matrix products. Each tensor is read or written once. An expanded tensor counts the bytes of its storage.
    """
    name = func.overloadpacket.__name__
    if name in _ALLOCATES or collective_kind(func) is not None:
        return None
    inputs, outputs = dense_tensors((args, kwargs)), dense_tensors(result)
    if not func._schema.is_mutable and _is_view(inputs, outputs):
        return None
    if name in _OVERWRITES:
        moved = _bytes(inputs)
    elif name in _GATHERS:
        moved = _bytes(inputs[1:]) + 2 * _bytes(outputs)  # reads only the selected part of the table
    else:
        moved = _bytes(inputs) + _bytes(outputs)
    return Work(_flops(func, args, kwargs, result), moved)


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    formula: Callable[..., float] | None = _FLOPS.get(func) or flop_registry.get(func.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


def _grouped_product(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> float:
    # If one factor is a matrix, each of its rows or columns is multiplied by one matrix of the other factor.
    rows = left if left.dim() <= right.dim() else left[0]
    return 2 * rows.numel() * right.shape[-1]


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> float:
    return 2 * _attention_pairs(query, key, _is_causal(args)) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> float:
    # Computes the scores again, and two products for each of the two products of the forward.
    columns = 3 * query.shape[-1] + 2 * value.shape[-1]
    # args[:2] are the output and its logsumexp.
    return 2 * _attention_pairs(query, key, _is_causal(args[2:])) * columns


def _attention_pairs(query: Tensor, key: Tensor, causal: bool) -> float:
    """Return the number of attention scores in all heads of all samples; half of them if causal."""
    return math.prod(query.shape[:-1]) * key.shape[-2] * (0.5 if causal else 1.0)


def _is_causal(args: Sequence[Any]) -> bool:
    return len(args) > 1 and bool(args[1])  # args[0] is the dropout probability


def _is_view(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    memory = {tensor.untyped_storage()._cdata for tensor in inputs}
    return bool(outputs) and all(tensor.untyped_storage()._cdata in memory for tensor in outputs)


def _bytes(parts: Sequence[Tensor]) -> int:
    return sum(min(part.nbytes, part.untyped_storage().nbytes()) for part in parts)


_ALLOCATES = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
_OVERWRITES = frozenset(
    ("copy_", "fill_", "zero_", "bernoulli_", "exponential_", "normal_", "random_", "uniform_")
)
_GATHERS = frozenset(("embedding", "gather", "index", "index_select"))
_FLOPS: Mapping[Any, Callable[..., float]] = {
    _aten._grouped_mm.default: _grouped_product,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
