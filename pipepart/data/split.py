"""Splits a mini-batch into micro-batches and gathers their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Splitter = Callable[[tuple[Any, Any], int], Iterable[tuple[Any, Any]]]


@dataclass(frozen=True)
class Whole:
    """A value within an input or a target that every micro-batch gets as it is, without this wrapper.

    For tensors whose dimension 0 is not that of samples: a mask ``[positions, positions]``, the weights of classes.
    """

    value: Any


pytree.register_pytree_node(Whole, lambda whole: ([whole.value], None), lambda values, _: Whole(*values))


class Apart:
    """In place of a target whose parts are of unlike lengths, or the like, and cannot be put together."""


class MicroBatches(NamedTuple):
    """A mini-batch in parts.

    Attributes:
        inputs, targets: one entry a part.
        sizes: samples in each part.
        target: of the whole mini-batch, or :class:`Apart`.
    """

    inputs: list[Any]
    targets: list[Any]
    sizes: list[int]
    target: Any


def micro_batches_of(value: Any, target: Any, most: int, splitter: Splitter | None = None) -> MicroBatches:
    """Splits a mini-batch into ``most`` parts, or into as many as it has samples if these are fewer.

    Args:
        value: the input.
        target: the target, or None.
        most: parts at most.
        splitter: the user's way to do it, called with ``(value, target)`` and ``most``; it returns that many pairs of
            an input and a target or fewer, each with tensors ``[samples, ...]`` of its own. None for :func:`split`.

    Raises:
        TypeError, ValueError: as :func:`batch_size` does, of the whole or of a part; or the splitter returns none or
            too many parts, or something else.
    """
    if splitter is None:
        batch = batch_size(value, target)
        parts = min(most, batch)
        return MicroBatches(split(value, parts), split(target, parts), sizes(batch, parts), _bare(target))
    found = list(splitter((value, target), most))
    if not 1 <= len(found) <= most:
        raise ValueError(f"split returned {len(found)} parts of the mini-batch, 1 to {most} were asked for")
    for part in found:
        if not isinstance(part, tuple) or len(part) != 2:
            raise TypeError(f"split must return pairs (input, target), got a {type(part).__name__}")
    targets = [_bare(part) for _, part in found]
    return MicroBatches(
        [_bare(part) for part, _ in found], targets, [batch_size(*part) for part in found], joined(targets)
    )


def batch_size(sample: Any, target: Any = None) -> int:
    """Samples in a mini-batch: the extent of dimension 0, which the tensors of sample and target have in common.

    Tensors without dimensions and what is marked as :class:`Whole` have no part in that.

    Raises:
        TypeError: there is no tensor in the sample, or an array or list of samples that is none.
        ValueError: no tensor of the sample has a dimension, the extents differ, or there are no samples.
    """
    size = _common_size(sample, "the input", None)
    if size is None:
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(sample)):
            raise ValueError(
                "the input holds tensors without a batch dimension only: there is nothing to split"
            )
        raise TypeError(f"the input must hold a tensor, got {type(sample).__name__}")
    if size == 0:
        raise ValueError("the mini-batch holds no samples")
    _common_size(target, "the target", size)
    return size


def _common_size(nest: Any, what: str, size: int | None) -> int | None:
    if isinstance(nest, list) and size and len(nest) == size and not any(isinstance(x, Tensor) for x in nest):
        raise TypeError(
            f"{what} is a list of {size} {type(nest[0]).__name__}: make a tensor of it, torch.tensor(...), or say how "
            "to split it, Pipeline(..., split=...)"
        )
    for leaf in pytree.tree_leaves(nest, is_leaf=_is_whole):
        if isinstance(leaf, np.ndarray):
            raise TypeError(f"{what} holds a numpy array: make a tensor of it, torch.from_numpy(...)")
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            continue
        size = leaf.shape[0] if size is None else size
        if leaf.shape[0] != size:
            raise ValueError(
                f"{what} has {leaf.shape[0]} samples where the input has {size}; a tensor whose first dimension is "
                "not that of samples goes whole to every micro-batch as pipepart.Whole(tensor)"
            )
    return size


def split(nest: Any, parts: int) -> list[Any]:
    """The nest with each tensor split along dimension 0 into ``parts`` parts whose sizes differ by at most one.

    The larger parts come first. Parts are views. What is no tensor, has no dimension or is marked as :class:`Whole`
    goes whole into every part.
    """
    if isinstance(nest, Tensor):
        return _column(nest, parts)
    items, spec = pytree.tree_flatten(nest, is_leaf=_is_whole)
    columns = [_column(item, parts) for item in items]
    return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(parts)]


def _column(item: Any, parts: int) -> list[Any]:
    """One leaf of a nest, for each part."""
    if isinstance(item, Whole):
        return [item.value] * parts
    if not isinstance(item, Tensor) or item.dim() == 0:
        return [item] * parts
    return list(item.split(sizes(item.shape[0], parts)))  # unlike `tensor_split`, one node of a graph


def joined(targets: Sequence[Any]) -> Any:
    """The targets of several micro-batches as one, or :class:`Apart`. What all of them have in common is not joined."""
    columns = [pytree.tree_leaves(target) for target in targets]
    try:
        leaves = [_in_common(column) for column in zip(*columns, strict=True)]
    except RuntimeError:
        return Apart()
    return pytree.tree_unflatten(leaves, pytree.tree_structure(targets[0]))


def _in_common(column: Sequence[Any]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor) or all(one is first for one in column):
        return first
    return _join(column)


def _is_whole(nest: Any) -> bool:
    return isinstance(nest, Whole)


def _bare(nest: Any) -> Any:
    """The nest without marks."""
    return split(nest, 1)[0]


def sizes(batch: int, parts: int) -> list[int]:
    """Samples in each part of :func:`split`."""
    return [batch // parts + (index < batch % parts) for index in range(parts)]


def gather(outputs: Sequence[Any]) -> Any:
    """The outputs of the micro-batches as one of the mini-batch: tensors joined along dimension 0.

    A tensor without dimensions cannot be joined so; several are stacked. What is no tensor is the first's.
    """
    if isinstance(outputs[0], Tensor):
        return _join(outputs)
    columns = [pytree.tree_leaves(output) for output in outputs]
    spec = pytree.tree_structure(outputs[0])
    joined = [
        _join(column) if isinstance(column[0], Tensor) else column[0] for column in zip(*columns, strict=True)
    ]
    return pytree.tree_unflatten(joined, spec)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    here = [
        tensor.to(tensors[0].device) for tensor in tensors
    ]  # copies of the model return theirs where they are
    return torch.stack(here) if here[0].dim() == 0 else torch.cat(here)
