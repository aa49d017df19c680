"""Rules: which torch functions act on each sample alone, and which dimension of their result holds the samples.

A tensor of a micro-batch is followed as long as that of the mini-batch would be the concatenation of those of the
micro-batches along one dimension, :attr:`Rows.dim`. That dimension shows in the shapes for both numbers of samples. The
functions in ``RULES`` keep the samples apart under the conditions that their rules check. All others may mix samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..capture.recorded.recording.tables import words
from .tape import Ref, Tape
from .whole import ELEMENTWISE, WholeTape

SIZES_READ = "write flatten(1) for reshape(len(x), -1), and divide a sum over samples by it alone"


class Rows(NamedTuple):
    """Layout of a tensor that holds samples.

    Attributes:
        dim: the dimension along which those of the micro-batches make up that of the mini-batch.
        regular: whether its extent along ``dim`` is in proportion to the number of samples.
    """

    dim: int
    regular: bool


class Positions(NamedTuple):
    """Marks the indices of all samples, 0, 1, ..., by which a loss picks values of each sample."""


class LostError(Exception):
    """A function mixes samples, or is not known to keep them apart."""


class Operation:
    """A call of a micro-batch together with the same call for the mini-batch, and with what its arguments are.

    Args:
        place: of the call on both tapes.
        tape, whole: of the micro-batch, and of the mini-batch.
        states: of the leaves; None for constants and for what is no tensor.

    Attributes:
        call, name: the call.
        values, results: its leaves, with the tensors themselves, and the tensors that it returned.
        whole_leaves: its leaves for the mini-batch.
        samples: in the micro-batch.
        scaled: positions of leaves that are numbers in proportion to the number of samples.
        is_written: whether a constant among the leaves was written after the call.
    """

    def __init__(
        self, place: int, tape: Tape, whole: WholeTape, states: list[Any], samples: tuple[int, int]
    ) -> None:
        call = tape.calls[place]
        self.call, self.name, self.argument, self.states = call, call.name, call.argument, states
        self.values = [tape.value(leaf.number) if isinstance(leaf, Ref) else leaf for leaf in call.leaves]
        self.results = [tape.value(number) for number in call.numbers]
        self.whole_leaves = whole.calls[place].leaves if place < len(whole.calls) else []
        self.samples = samples[0]
        self.scaled = _in_proportion(call.leaves, self.whole_leaves, samples)
        self.is_written = any(
            state is None and tape.is_written(leaf)
            for place, (leaf, state) in enumerate(zip(call.leaves, states, strict=True))
            if place or not call.in_place
        )
        self._place, self._whole = place, whole

    @property
    def operands(self) -> list[tuple[Tensor, Rows | None]]:
        """The tensor arguments. Constants have no rows."""
        pairs = zip(self.values, self.states, strict=True)
        return [
            (value, state if isinstance(state, Rows) else None)
            for value, state in pairs
            if isinstance(value, Tensor)
        ]

    @property
    def rows(self) -> tuple[Tensor, Rows]:
        """The first operand with samples."""
        return next((tensor, rows) for tensor, rows in self.operands if rows)

    @property
    def regular(self) -> bool:
        """Whether all operands with samples are regular."""
        return all(rows.regular for _, rows in self.operands if rows)

    @property
    def wholes(self) -> list[Tensor]:
        """The results of the call for the mini-batch, without data.

        Raises:
            LostError: the call does not work for that number of samples.
        """
        if self._place in self._whole.failed:
            raise LostError(
                "does not take any number of samples, or needs values to know its shape: write -1 for the number of "
                "samples, and num_classes for one_hot"
            )
        return [self._whole.value(number) for number in self._whole.calls[self._place].numbers]

    @property
    def whole_shapes(self) -> list[torch.Size]:
        """The shapes of the tensor arguments for the mini-batch."""
        return [
            self._whole.value(leaf.number).shape if isinstance(leaf, Ref) else leaf.shape
            for leaf in self.whole_leaves
            if isinstance(leaf, Ref | Tensor)
        ]

    def state_of(self, leaf: Any) -> Any:
        """Return the state of one of the arguments."""
        pairs = zip(self.call.leaves, self.states, strict=True)
        return next((state for one, state in pairs if one is leaf), None)

    def value_of(self, leaf: Any) -> Any:
        """Return one of the arguments itself."""
        pairs = zip(self.call.leaves, self.values, strict=True)
        return next((value for one, value in pairs if one is leaf), leaf)

    def single(self) -> tuple[Tensor, Rows]:
        """Return the first operand, which must be the only one with samples."""
        (tensor, rows), *others = self.operands
        if rows is None or any(other for _, other in others):
            raise LostError("takes samples where constants are expected")
        return tensor, rows

    def layout(self) -> list[int]:
        """Return the dimension of the samples in each result.

        Raises:
            LostError: no dimension or several grow with the number of samples.
        """
        found = []
        for part, whole in zip(self.results, self.wholes, strict=True):
            same = part.dim() == whole.dim()
            dims = [dim for dim in range(part.dim()) if part.shape[dim] != whole.shape[dim]] if same else []
            if len(dims) > 1:
                raise LostError("pairs samples with other samples")
            if not dims:
                raise LostError("works across samples, or takes some of them")
            found += dims
        return found


def _in_proportion(leaves: Sequence[Any], wholes: Sequence[Any], samples: tuple[int, int]) -> list[int]:
    """Return the places of numbers that are in proportion to the samples of a micro-batch and of the mini-batch.

    Raises:
        LostError: other arguments differ, so that the call is another one for the mini-batch.
    """
    if len(leaves) != len(wholes):
        raise LostError(f"depends on the number of samples: {SIZES_READ}")
    scaled = []
    for place, (part, whole) in enumerate(zip(leaves, wholes, strict=True)):
        if isinstance(part, Ref) and isinstance(whole, Ref):
            same = part.number == whole.number
        elif isinstance(part, int | float) and isinstance(whole, int | float) and part != whole:
            same = part * samples[1] == whole * samples[0]
            scaled.append(place)
        else:
            same = part is whole or (not isinstance(part, Tensor) and part == whole)
        if not same:
            raise LostError(f"depends on the number of samples: {SIZES_READ}")
    return scaled


def kept(operation: Operation) -> list[Rows]:
    """Rule for functions that keep all samples in their order: elementwise functions with broadcasting, and views."""
    dims = operation.layout()
    pairs = zip(operation.operands, operation.whole_shapes, strict=True)
    extents = next((tensor.shape[rows.dim], shape[rows.dim]) for (tensor, rows), shape in pairs if rows)
    for dim, part, whole in zip(dims, operation.results, operation.wholes, strict=True):
        if (part.shape[dim], whole.shape[dim]) != extents:
            raise LostError("takes some samples and leaves others, or pairs them")
    return [Rows(dim, operation.regular) for dim in dims]


def _along(position: int, default: int | None = None) -> Callable[[Operation], list[Rows]]:
    """A function that works along dimensions which it names, none of them that of samples."""

    def rule(operation: Operation) -> list[Rows]:
        tensor, rows = operation.rows
        dims = max(operand.dim() for operand, _ in operation.operands)
        named = operation.argument(position, "dim", "axis", default=default)
        if isinstance(named, bool) or not isinstance(named, int | tuple | list):
            raise LostError("works across samples")
        along = {operator.index(one) % dims for one in ([named] if isinstance(named, int) else named)}
        if not along or dims - tensor.dim() + rows.dim in along:
            raise LostError("works across samples")
        return kept(operation)

    return rule


def _reshaped(operation: Operation) -> list[Rows]:
    """A reshape that leaves the elements of samples in their order."""
    _, rows = operation.operands[0]
    if rows is None or rows.dim or operation.layout() != [0]:
        raise LostError("may put several samples into one row: write -1 for the first size")
    return [Rows(0, operation.regular)]


def _indexed(operation: Operation) -> list[Rows]:
    """Slices of dimensions other than that of the samples, a mask over samples, or values for each sample."""
    index = operation.argument(1)
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, Ref | Tensor | list) for part in parts):
        return kept(operation)
    mask = operation.value_of(index)
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        return _masked(operation)
    if operation.states[0] is None and isinstance(operation.state_of(index), Rows):
        return kept(operation)  # rows of a table, such as weights of classes
    if isinstance(operation.state_of(parts[0]), Positions) and _picks_from_each_sample(operation, parts):
        return kept(operation)
    raise LostError("picks samples by an index: use a mask, or gather")


def _picks_from_each_sample(operation: Operation, index: tuple[Any, ...]) -> bool:
    """Return True for ``tensor[positions, *columns]`` if each column is a number or has one index per sample."""
    tensor, rows = operation.rows
    positions, *columns = [operation.value_of(part) for part in index]
    has_samples = [isinstance(operation.state_of(part), Rows) for part in index[1:]]
    return (
        not rows.dim
        and len(positions) == len(tensor)
        and all(
            isinstance(column, int) or (of_samples and column.dim() == 1)
            for column, of_samples in zip(columns, has_samples, strict=True)
        )
    )


def _numbered(operation: Operation) -> Positions:
    """The indices of the samples of a tensor."""
    if operation.single()[1].dim:
        raise LostError("is not known to give the same for every micro-batch")
    return Positions()


def _masked(operation: Operation) -> list[Rows]:
    """What a mask picks from each sample, one sample after the other."""
    (tensor, rows), (mask, of_mask) = operation.operands
    dims = mask.dim() if operation.name == "__getitem__" else tensor.dim()
    if not (rows and of_mask) or rows.dim or of_mask.dim or tensor.shape[:dims] != mask.shape:
        raise LostError("picks samples by an index")
    return [Rows(0, False)]


def _gathered(operation: Operation) -> list[Rows]:
    """Values of each sample at places that are given for that sample."""
    (tensor, rows), (index, of_index) = operation.operands[:2]
    dim = operation.argument(1 if operation.name == "gather" else 2, "dim")
    if rows is None or of_index is None or not isinstance(dim, int) or tensor.dim() != index.dim():
        raise LostError("picks by places that are not given for each sample")
    same = rows.dim == of_index.dim and tensor.shape[rows.dim] == index.shape[rows.dim]
    if not same or dim % tensor.dim() == rows.dim:
        raise LostError("picks values of other samples")
    return kept(operation)


def _spatial(operation: Operation) -> list[Rows]:
    """A function that works along the last dimensions of ``[samples, channels, ...]``."""
    tensor, rows = operation.single()
    if rows.dim or tensor.dim() < 3 or operation.results[0].dim() != tensor.dim():
        raise LostError("works across samples")
    return kept(operation)


def _rules() -> Iterator[tuple[frozenset[str], Callable[[Operation], list[Rows] | Positions]]]:
    yield ELEMENTWISE, kept
    yield (
        words("transpose permute movedim swapaxes t T mT unsqueeze squeeze narrow select expand unbind"),
        kept,
    )
    yield words("pad one_hot split chunk"), kept
    yield (
        words(
            "softmax log_softmax logsumexp sum mean amax amin max min argmax argmin all any cumsum cumprod std var"
        ),
        _along(1),
    )
    yield words("norm"), _along(2)
    yield words("normalize cosine_similarity"), _along(2, 1)
    yield words("view reshape flatten unflatten view_as reshape_as"), _reshaped
    yield words("__getitem__"), _indexed
    yield words("positions"), _numbered
    yield words("gather take_along_dim"), _gathered
    yield words("masked_select"), _masked
    yield words("interpolate avg_pool1d avg_pool2d max_pool1d max_pool2d"), _spatial


RULES = {name: rule for group, rule in _rules() for name in group}
FILLS = words("zeros ones full new_zeros new_ones new_full expand")
"""Functions that give the same for each sample."""
ALIKE = RULES.keys() | FILLS | words("tensor as_tensor arange linspace eye tril triu __setitem__")
"""Functions whose result is the same for every micro-batch if their arguments are."""
TAKES_SIZES = FILLS | words("view reshape unflatten arange")
"""Functions that may take a number of samples."""
