"""Splits a mini-batch into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..autograd.nests import check_nest
from ..input_error import InputError, InputTypeError
from .arguments import Arguments, check_arguments

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm

Splitter = Callable[[tuple[Any, Any], int], Iterable[tuple[Any, Any]]]

_TO_SPLIT = (
    "pass its tensors themselves, give all of it to every micro-batch as pipepart.Whole(...), or split the mini-batch "
    "yourself with Pipeline(..., split=...)"
)


@dataclass(frozen=True)
class Whole:
    """Wrapper for a value that is not split: every micro-batch gets the whole value.

    For values in an input or a target whose dimension 0 is not that of samples: a mask ``[positions, positions]``,
    the weights of classes.
    """

    value: Any


pytree.register_pytree_node(Whole, lambda whole: ([whole.value], None), lambda values, _: Whole(*values))


class Apart:
    """Stands for the target of a mini-batch whose parts cannot be joined because their shapes differ."""


class MicroBatches(NamedTuple):
    """A mini-batch split into micro-batches.

    Attributes:
        inputs, targets: one entry a part.
        sizes: samples in each part.
        target: of the whole mini-batch, or :class:`Apart`.
        by_samples: whether each sample is in one part, so that outputs can be joined along dimension 0.
        regular: whether the shapes of the parts differ in nothing but the number of samples.
    """

    inputs: list[Any]
    targets: list[Any]
    sizes: list[int]
    target: Any
    by_samples: bool = True
    regular: bool = True


class Batching:
    """Splits the arguments of a model's calls into micro-batches.

    Args:
        first_layer: the name of the model's first layer, and the layer.
        modules: all modules of the model.
        micro_batches: parts of a mini-batch, at most.
        splitter: the user's function in place of the default rule, or None.
    """

    def __init__(
        self,
        first_layer: tuple[str, nn.Module],
        modules: Iterable[nn.Module],
        micro_batches: int,
        splitter: Splitter | None,
    ) -> None:
        self._first_layer = first_layer
        self._norms = [module for module in modules if isinstance(module, _BATCH_NORMS)]
        self._micro_batches = micro_batches
        self._splitter = splitter
        self._accepted: set[tuple[int, tuple[str, ...]]] = set()  # forms of calls that the first layer takes

    def parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None) -> MicroBatches:
        """Return the micro-batches of a call ``pipe(*args, **kwargs)``.

        Raises:
            TypeError, ValueError: the first layer does not take the arguments, or they cannot be split.
        """
        is_one = len(args) == 1 and not kwargs and isinstance(args[0], Arguments)
        arguments = args[0] if is_one else Arguments(*args, **kwargs)
        form = len(arguments.args), tuple(arguments.kwargs)
        if form not in self._accepted:
            check_arguments(*self._first_layer, arguments, target)
            self._accepted.add(form)
        least = least_samples(self._norms)
        return micro_batches_of(arguments.input, target, self._micro_batches, self._splitter, least)


def micro_batches_of(
    value: Any, target: Any, most: int, splitter: Splitter | None = None, least_samples: int = 1
) -> MicroBatches:
    """Split a mini-batch into ``most`` parts, or fewer if they would have less than ``least_samples`` samples each.

    Args:
        value: the input: one value, or :class:`~pipepart.data.arguments.Arguments`.
        target: the target, or None.
        most: parts at most.
        splitter: the user's function, called with ``(value, target)`` and ``most``. It returns that many pairs of an
            input and a target or fewer, each with tensors ``[samples, ...]`` of its own. None for :func:`split`.
        least_samples: the fewest samples that a part may have, if the mini-batch has as many. A splitter decides
            itself.

    Raises:
        TypeError, ValueError: as :func:`batch_size`, for the whole or a part; a value cannot be split; or the splitter
            returns no parts, too many, or values of another type.
    """
    if splitter is None:
        batch = batch_size(value, target)
        _check_splittable(value, "the input", batch)
        _check_splittable(target, "the target", batch)
        parts = max(1, min(most, batch // least_samples))
        return MicroBatches(split(value, parts), split(target, parts), sizes(batch, parts), _bare(target))
    pieces = list(splitter((value, target), most))
    if not 1 <= len(pieces) <= most:
        raise InputError(f"split returned {len(pieces)} parts of the mini-batch, 1 to {most} were asked for")
    for part in pieces:
        if not isinstance(part, tuple) or len(part) != 2:
            raise InputTypeError(f"split must return pairs (input, target), got a {type(part).__name__}")
    targets = [_bare(part) for _, part in pieces]
    counts = [batch_size(*part) for part in pieces]
    by_samples = _samples(value) in (None, sum(counts))
    inputs = [_bare(part) for part, _ in pieces]
    regular = are_regular([*zip(inputs, targets, strict=True)])
    return MicroBatches(inputs, targets, counts, _joined(targets), by_samples, regular)


def are_regular(parts: Sequence[Any]) -> bool:
    """Return True if the shapes of parts differ in nothing but the number of samples, the size of dimension 0."""
    shapes = [
        [leaf.shape[1:] for leaf in pytree.tree_leaves(part) if isinstance(leaf, Tensor) and leaf.dim()]
        for part in parts
    ]
    return all(other == shapes[0] for other in shapes)


def least_samples(modules: Iterable[nn.Module], training: bool = False) -> int:
    """Return the smallest micro-batch allowed: two samples if a BatchNorm uses batch statistics, otherwise one.

    A single sample ``[1, channels]`` has no variance.

    Args:
        modules: of the model.
        training: count a BatchNorm in evaluation mode as well.
    """
    return (
        2
        if any(isinstance(module, _BATCH_NORMS) and (training or module.training) for module in modules)
        else 1
    )


def batch_size(sample: Any, target: Any = None) -> int:
    """Return the number of samples: the size of dimension 0, equal for all tensors of sample and target.

    Tensors without dimensions and values marked as :class:`Whole` are ignored.

    Raises:
        TypeError: there is no tensor in the sample, or there is a numpy array or another object that holds tensors.
        ValueError: no tensor of the sample has a dimension, the extents differ, or there are no samples.
    """
    size = _common_size(sample, "the input", None)
    if size is None:
        leaves = pytree.tree_leaves(sample)
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            raise InputError(
                "the input holds tensors without a batch dimension only: there is nothing to split"
            )
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "nothing"
        raise InputTypeError(f"the input must hold a tensor, got {kinds}: give one mini-batch of samples")
    if size == 0:
        raise InputError("the mini-batch holds no samples")
    _common_size(target, "the target", size)
    return size


def _samples(value: Any) -> int | None:
    """Return the number of samples in a mini-batch that the user splits; None if its tensors differ."""
    try:
        return _common_size(value, "the input", None)
    except (TypeError, ValueError):
        return None


def _common_size(nest: Any, what: str, size: int | None) -> int | None:
    check_nest(nest, what, _TO_SPLIT, _is_whole)
    for place, leaf in enumerate(_leaves(nest, _is_kept)):
        if isinstance(leaf, np.ndarray):
            raise InputTypeError(f"{what} holds a numpy array: make a tensor of it, torch.from_numpy(...)")
        if isinstance(leaf, PackedSequence):
            samples = int(leaf.batch_sizes[0])
        elif isinstance(leaf, Tensor) and leaf.dim():
            samples = leaf.shape[0]
        else:
            continue
        size = samples if size is None else size
        if samples != size:
            raise InputError(
                f"{what}{_path_of(nest, place)} has {samples} samples where the input has {size}; a tensor whose first "
                "dimension is not that of samples goes whole to every micro-batch as pipepart.Whole(tensor)"
            )
    return size


def _path_of(nest: Any, place: int) -> str:
    """Return the path of a leaf in a nest, as in ``[1]['mask']``; empty if a container has no keys."""
    try:
        return pytree.keystr(pytree.tree_leaves_with_path(nest, is_leaf=_is_kept)[place][0])
    except ValueError:
        return ""


def _check_splittable(nest: Any, what: str, samples: int) -> None:
    """Raise for values that hold samples and cannot be split along dimension 0.

    Raises:
        TypeError: a list or tuple with one entry a sample and no tensor, a PackedSequence, or a sparse or nested
            tensor.
    """
    for leaf in _leaves(nest, lambda value: _is_kept(value) or _is_row_of_values(value)):
        if isinstance(leaf, list | tuple) and len(leaf) == samples > 1:
            raise InputTypeError(
                f"{what} holds a {type(leaf).__name__} of {samples} {type(leaf[0]).__name__}, as many as there are "
                f"samples: make a tensor of it, torch.tensor(...), or {_TO_SPLIT}"
            )
        if isinstance(leaf, PackedSequence):
            raise InputTypeError(f"{what} holds a PackedSequence, whose rows are not samples: {_TO_SPLIT}")
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            kind = "nested" if leaf.is_nested else f"sparse ({leaf.layout})"
            raise InputTypeError(
                f"{what} holds a {kind} tensor {list(leaf.shape)}, which cannot be split: {_TO_SPLIT}"
            )


def _is_row_of_values(nest: Any) -> bool:
    """Return True for a list or a plain tuple without tensors."""
    if not isinstance(nest, list) and type(nest) is not tuple:
        return False
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(nest))


def split(nest: Any, parts: int) -> list[Any]:
    """Split each tensor of a nest along dimension 0 into ``parts`` views whose sizes differ by at most one.

    The larger parts come first. Tensors without dimensions, values that are not tensors and values marked as
    :class:`Whole` are replicated to every part.
    """
    if isinstance(nest, Tensor):
        return _column(nest, parts)
    items, spec = pytree.tree_flatten(nest, is_leaf=_is_whole)
    columns = [_column(item, parts) for item in items]
    return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(parts)]


def _column(item: Any, parts: int) -> list[Any]:
    """Return one leaf of a nest for each part."""
    if isinstance(item, Whole):
        return [item.value] * parts
    if not isinstance(item, Tensor) or item.dim() == 0 or parts == 1:
        return [item] * parts
    return list(item.split(sizes(item.shape[0], parts)))  # unlike `tensor_split`, one node of a graph


def _leaves(nest: Any, is_leaf: Callable[[Any], bool]) -> Sequence[Any]:
    return (nest,) if type(nest) is Tensor else pytree.tree_leaves(nest, is_leaf=is_leaf)


def _is_whole(nest: Any) -> bool:
    return isinstance(nest, Whole)


def _is_kept(nest: Any) -> bool:
    return isinstance(nest, Whole | PackedSequence)


def _bare(nest: Any) -> Any:
    """Return the nest without :class:`Whole` wrappers."""
    return nest if isinstance(nest, Tensor) else split(nest, 1)[0]


def sizes(batch: int, parts: int) -> list[int]:
    """Return the number of samples in each part of :func:`split`."""
    least, larger = divmod(batch, parts)
    return [least + 1] * larger + [least] * (parts - larger)


def _joined(targets: Sequence[Any]) -> Any:
    """Join the targets of several micro-batches, or return :class:`Apart`. Shared objects are kept as they are."""
    columns = [pytree.tree_leaves(target) for target in targets]
    try:
        leaves = [_in_common(column) for column in zip(*columns, strict=True)]
    except (RuntimeError, ValueError):
        return Apart()
    return pytree.tree_unflatten(leaves, pytree.tree_structure(targets[0]))


def _in_common(column: Sequence[Any]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor) or all(value is first for value in column):
        return first
    return together(column)


def together(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along dimension 0, on the device of the first; stack scalars."""
    if len(tensors) == 1:
        return tensors[0]
    here = [tensor.to(tensors[0].device) for tensor in tensors]
    return torch.stack(here) if here[0].dim() == 0 else torch.cat(here)
