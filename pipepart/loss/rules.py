"""Rules: which torch functions act on each sample alone, and which dimension of their result holds the samples.

A tensor of a micro-batch is followed as long as that of the mini-batch would be the concatenation of those of the
micro-batches along one dimension, :attr:`Rows.dim`. The functions in ``RULES`` keep the samples apart under the
conditions that their rules check. All others may mix samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.own_copy import tensors
from ..capture.recorded.recording.tables import words
from .sized import without_data
from .tape import Call, Ref

SIZES_READ = "write flatten(1) for reshape(len(x), -1), and divide a sum over samples by it alone"
_MANY = 8191  # a prime: no extent is by chance as many times another one
_MIXES = "pairs samples with other samples"


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


class Operation(NamedTuple):
    """A call of a micro-batch.

    Attributes:
        call: the call.
        values, results: its leaves, with the tensors themselves, and the tensors that it returned.
        states: of the leaves; None for constants and for what is no tensor.
        scaled: places of leaves that are numbers in proportion to the number of samples.
        samples: in the micro-batch.
        is_written: whether a constant among the leaves is written after the call.
    """

    call: Call
    values: list[Any]
    results: list[Tensor]
    states: list[Any]
    scaled: list[int]
    samples: int
    is_written: bool = False

    @property
    def operands(self) -> list[tuple[Tensor, Rows | None]]:
        """The tensor arguments. Constants have no rows."""
        pairs = zip(self.values, self.states, strict=True)
        return [(v, s if isinstance(s, Rows) else None) for v, s in pairs if isinstance(v, Tensor)]

    @property
    def rows(self) -> tuple[Tensor, Rows]:
        """The first operand with samples."""
        return next((tensor, rows) for tensor, rows in self.operands if rows)

    def state_of(self, leaf: Any) -> Any:
        """Return the state of one of the arguments."""
        pairs = zip(self.call.leaves, self.states, strict=True)
        return next((state for operand, state in pairs if operand is leaf), None)

    def value_of(self, leaf: Any) -> Any:
        """Return one of the arguments itself."""
        pairs = zip(self.call.leaves, self.values, strict=True)
        return next((value for operand, value in pairs if operand is leaf), leaf)

    def single(self) -> tuple[Tensor, Rows]:
        """Return the first operand, which must be the only one with samples."""
        (tensor, rows), *others = self.operands
        if rows is None or any(other for _, other in others):
            raise LostError("takes samples where constants are expected")
        return tensor, rows

    def layout(self) -> list[int]:
        """Return the dimension of the samples in each result: the one that grows with them.

        Raises:
            LostError: no dimension or several do, or the call does not take any number of samples.
        """
        result = []
        try:
            args, kwargs = self.call.filled(map(self._grown, range(len(self.values))))
            grown = tensors(self.call.function(*args, **kwargs))
        except Exception as error:
            raise LostError(
                "does not take any number of samples, or needs values to know its shape: write -1 for the number of "
                "samples, and num_classes for one_hot"
            ) from error
        if len(grown) != len(self.results):
            raise LostError("works across samples, or takes some of them")
        for part, whole in zip(self.results, grown, strict=True):
            same = part.dim() == whole.dim()
            dims = [dim for dim in range(part.dim()) if part.shape[dim] != whole.shape[dim]] if same else []
            if len(dims) > 1:
                raise LostError(_MIXES)
            if not dims or whole.shape[dims[0]] != part.shape[dims[0]] * _MANY:
                raise LostError("works across samples, or takes some of them")
            result += dims
        return result

    def _grown(self, place: int) -> Any:
        """Return an argument for many times as many samples, without data."""
        value, state = self.values[place], self.states[place]
        if isinstance(value, Tensor):
            dim = state.dim if isinstance(state, Rows) else None
            shape = [size * _MANY if at == dim else size for at, size in enumerate(value.shape)]
            return without_data(value, shape)
        if place in self.scaled:
            return value * _MANY
        return torch.device("meta") if isinstance(value, torch.device) else value


def kept(operation: Operation) -> list[Rows]:
    """Rule for views and other functions that keep all samples in their order."""
    tensor, rows = operation.rows
    dims = operation.layout()
    if any(
        result.shape[dim] != tensor.shape[rows.dim]
        for dim, result in zip(dims, operation.results, strict=True)
    ):
        raise LostError("takes some samples and leaves others, or pairs them")
    return [Rows(dim, rows.regular) for dim in dims]


def elementwise(operation: Operation) -> list[Rows]:
    """Rule for functions whose results have the shape that their arguments broadcast to."""
    if len(operation.results) > 1:
        raise LostError("picks samples by an index")  # where(mask)
    return [broadcast(operation, operation.results[0].dim())]


def _converted(operation: Operation) -> list[Rows]:
    """A conversion. Another tensor only says what to."""
    return [operation.rows[1]]


def broadcast(operation: Operation, dims: int) -> Rows:
    """Return where the samples are in a result with the shape that the arguments of a call broadcast to.

    Args:
        operation: the call.
        dims: of the result.
    """
    layouts = {
        (rows.dim - t.dim(), t.shape[rows.dim], rows.regular) for t, rows in operation.operands if rows
    }
    if len(layouts) != 1:
        raise LostError(_MIXES)
    ((back, _, regular),) = layouts  # broadcasting counts dimensions from the last one
    for tensor, rows in operation.operands:
        if rows is None and tensor.dim() >= -back and tensor.shape[back] != 1:
            raise LostError("pairs samples with entries of a constant")
    return Rows(dims + back, regular)


def _along(position: int, default: int | None = None) -> Callable[[Operation], list[Rows]]:
    """A function that works along dimensions which it names, none of them that of samples."""

    def rule(operation: Operation) -> list[Rows]:
        tensor, rows = operation.rows
        dims = max(operand.dim() for operand, _ in operation.operands)
        named = operation.call.argument(position, "dim", "axis", default=default)
        if isinstance(named, bool) or not isinstance(named, int | tuple | list):
            raise LostError("works across samples")
        along = {operator.index(dim) % dims for dim in ([named] if isinstance(named, int) else named)}
        if not along or dims - tensor.dim() + rows.dim in along:
            raise LostError("works across samples")
        return kept(operation)

    return rule


def _reshaped(operation: Operation) -> list[Rows]:
    """A reshape that leaves the elements of samples in their order."""
    _, rows = operation.operands[0]
    if rows is None or rows.dim or operation.layout() != [0]:
        raise LostError("may put several samples into one row: write -1 for the first size")
    return [Rows(0, rows.regular)]


def _indexed(operation: Operation) -> list[Rows]:
    """Slices of dimensions other than that of the samples, a mask over samples, or values for each sample."""
    index = operation.call.argument(1)
    parts = index if type(index) is tuple else (index,)
    if not any(isinstance(part, Ref | Tensor | list) for part in parts):
        return kept(operation)
    mask = operation.value_of(index)
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        return _masked(operation)
    if operation.states[0] is None and isinstance(operation.state_of(index), Rows):
        return kept(operation)  # rows of a table, such as weights of classes
    if isinstance(operation.state_of(parts[0]), Positions) and _picks_from_each_sample(operation, parts):
        return [Rows(0, operation.rows[1].regular)]
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


def _masked(operation: Operation) -> list[Rows]:
    """What a mask picks from each sample, one sample after the other."""
    (tensor, rows), (mask, of_mask) = operation.operands
    dims = mask.dim() if operation.call.name == "__getitem__" else tensor.dim()
    if not (rows and of_mask) or rows.dim or of_mask.dim or tensor.shape[:dims] != mask.shape:
        raise LostError("picks samples by an index")
    return [Rows(0, False)]


def _gathered(operation: Operation) -> list[Rows]:
    """Values of each sample at places that are given for that sample."""
    (tensor, rows), (index, of_index) = operation.operands[:2]
    dim = operation.call.argument(1 if operation.call.name == "gather" else 2, "dim")
    if rows is None or of_index is None or not isinstance(dim, int) or tensor.dim() != index.dim():
        raise LostError("picks by places that are not given for each sample")
    same = rows == of_index and tensor.shape[rows.dim] == index.shape[rows.dim]
    if not same or dim % tensor.dim() == rows.dim:
        raise LostError("picks values of other samples")
    return kept(operation)


def _spatial(operation: Operation) -> list[Rows]:
    """A function that works along the last dimensions of ``[samples, channels, ...]``."""
    tensor, rows = operation.single()
    if rows.dim or tensor.dim() < 3 or operation.results[0].dim() != tensor.dim():
        raise LostError("works across samples")
    return kept(operation)


def _rules() -> Iterator[tuple[frozenset[str], Callable[[Operation], list[Rows]]]]:
    yield (
        words(
            "abs absolute neg negative sign exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow float_power "
            "sin cos tan atan atan2 sinh cosh tanh sigmoid logit logsigmoid softplus softsign relu relu6 leaky_relu "
            "elu selu gelu silu mish hardtanh erf xlogy clamp clip clamp_min clamp_max maximum minimum add sub "
            "subtract rsub mul multiply div divide true_divide floor_divide remainder reciprocal round floor ceil eq "
            "ne lt le gt ge less greater less_equal greater_equal not_equal logical_and logical_or logical_xor "
            "logical_not bitwise_and bitwise_or bitwise_not isnan isinf isfinite nan_to_num where masked_fill lerp "
            "logaddexp hypot float double half bfloat16 long int bool type cpu cuda clone contiguous "
            "detach zeros_like ones_like full_like expand_as __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ "
            "__or__ __xor__ __invert__ __rsub__ __rdiv__ __rpow__ __radd__ __rmul__ __truediv__ __rtruediv__ __pow__"
        ),
        elementwise,
    )
    yield words("to type_as"), _converted
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
    yield words("gather take_along_dim"), _gathered
    yield words("masked_select"), _masked
    yield words("interpolate"), _spatial


RULES = {name: rule for group, rule in _rules() for name in group}
ALIKE = RULES.keys() | words("zeros ones full tensor as_tensor arange linspace eye tril triu __setitem__")
"""Functions whose result is the same for every micro-batch if their arguments are."""
TAKES_SIZES = words("view reshape unflatten expand")
"""Functions that may take a number of samples."""
