"""Counts the floating point operations of a torch operation, and the bytes that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ...autograd.sparse import dense_tensors

_aten = torch.ops.aten


class Work(NamedTuple):
    """Work of one operation: floating point operations of matrix products, and bytes read and written."""

    flops: float
    bytes: float


def work_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work | None:
    """Return the work of an operation called under a ``TorchDispatchMode``; None if it runs no kernel, like a view.

    Counts the floating point operations that ``torch.utils.flop_counter`` knows, and those of attention and grouped
    matrix products. Each tensor is read or written once. An expanded tensor counts the bytes of its storage.
    """
    name = func.overloadpacket.__name__
    if name in _ALLOCATES:
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
