"""Joins the outputs of micro-batches into the output of the mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..autograd.nests import check_nest
from ..autograd.own_copy import tensors
from ..input_error import InputError
from .split import MicroBatches, together

Merger = Callable[[list[Any]], Any]

_TO_MERGE = "Pipeline(..., merge=lambda outputs: ...)"


def gather(outputs: Sequence[Any], batch: MicroBatches, merge: Merger | None = None) -> Any:
    """Join the outputs of the micro-batches into one output of the mini-batch.

    Tensors are joined along dimension 0; several tensors without dimensions are stacked. Any other value must be the
    same for all micro-batches.

    Args:
        outputs: one entry a micro-batch, in the order of the parts.
        batch: the mini-batch that was split.
        merge: the user's function in place of this rule: called with the list of outputs, it returns the output.

    Raises:
        TypeError: the outputs hold objects with tensors that cannot be taken apart.
        ValueError: the outputs cannot be joined by this rule.
    """
    home = next((tensor.device for tensor in tensors(outputs[0])), None)
    if home is not None:  # outputs of replicas are on their own devices
        outputs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(home), list(outputs))
    if merge is not None:
        return merge(list(outputs))
    if len(outputs) == 1:
        return outputs[0]
    if not batch.by_samples:
        raise InputError(
            f"the parts of the mini-batch, {batch.sizes} samples, are not split along its samples, so their outputs "
            f"cannot be joined along dimension 0: say how to join them, {_TO_MERGE}"
        )
    for output in outputs:
        check_nest(output, "the output", f"return its tensors themselves, or say how to join it, {_TO_MERGE}")
    columns = [
        pytree.tree_flatten_with_path(output, is_leaf=lambda value: isinstance(value, PackedSequence))
        for output in outputs
    ]
    spec = columns[0][1]
    if any(other != spec for _, other in columns):
        raise InputError(f"the outputs of the micro-batches are nests of unlike structure: {_TO_MERGE}")
    rows = zip(*(leaves for leaves, _ in columns), strict=True)
    return pytree.tree_unflatten(
        [
            _gathered("output" + pytree.keystr(row[0][0]), [leaf for _, leaf in row], batch.sizes)
            for row in rows
        ],
        spec,
    )


def _gathered(name: str, column: Sequence[Any], samples: Sequence[int]) -> Any:
    """Join one leaf of the output from those of the micro-batches."""
    first = column[0]
    if not isinstance(first, Tensor):
        if not all(value is first or _equal(value, first) for value in column):
            raise InputError(
                f"{name} differs between micro-batches, and is no tensor that could be joined: {list(column)}. Return "
                f"a tensor [samples, ...], or say how to join it, {_TO_MERGE}"
            )
        return first
    fits = all(
        tensor.dim() == first.dim()
        and tensor.shape[1:] == first.shape[1:]
        and (not first.dim() or tensor.shape[0] * samples[0] == first.shape[0] * count)
        for tensor, count in zip(column, samples, strict=True)
    )
    if not fits:
        shapes = [list(tensor.shape) for tensor in column]
        raise InputError(
            f"{name} has shapes {shapes} for micro-batches of {list(samples)} samples, which cannot be joined along "
            f"dimension 0: return it as [samples, ...], or say how to join it, {_TO_MERGE}"
        )
    return together(column)


def _equal(first: Any, second: Any) -> bool:
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:
        return False
