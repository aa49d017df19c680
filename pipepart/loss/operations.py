"""Rules: which torch functions act on each sample alone, and which dimension of their result holds the samples.

A tensor of a micro-batch is followed as long as that of the mini-batch would be the concatenation of those of the
micro-batches along one dimension, :attr:`Rows.dim`. The functions in ``RULES`` keep that so under the conditions that
their rules check. All others may mix samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .sample_shape import Shape
from .terms import Replay, Terms

_MANY = 1_000_003  # times as many samples: more than any number in a loss that bounds a slice


class Rows(NamedTuple):
    """Layout of a tensor that holds samples.

    Attributes:
        dim: the dimension along which those of the micro-batches make up that of the mini-batch.
        regular: whether its extent along ``dim`` is in proportion to the number of samples.
    """

    dim: int
    regular: bool


class Lost(NamedTuple):
    """A tensor that cannot be traced back to samples, with the reason."""

    reason: str


class Positions(NamedTuple):
    """Marks a tensor of sample indices 0, 1, ..., which loss functions use to pick values of each sample."""


State = Rows | Terms | Lost | Positions | None  # None for a constant, the same for all micro-batches


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that a loss uses.

    Attributes:
        tensor: it is held, so that no other gets its identity.
        version, node: as they were when this was noted.
        key: equal in two micro-batches if the tensors are computed alike.
        state: what it is.
        replay: computes it for another micro-batch; None if it does not come from the target alone.
    """

    tensor: Tensor
    version: int
    node: Any
    key: int
    state: State = None
    replay: Replay | None = None


class LostError(Exception):
    """A function mixes samples, or is not known to keep them apart."""


class Call:
    """A call of torch that a loss makes.

    Attributes:
        function, name: what is called; of a call that writes into its first argument the name of the plain function.
        in_place: whether it is such a call.
        args, kwargs: as the loss gives them.
        leaves, entries: all arguments in a row, and what is known of those that are tensors.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entry_of: Callable[[Tensor], Entry],
    ) -> None:
        name = getattr(function, "__name__", repr(function))
        name = function.__self__.__name__ if name == "__get__" else name
        self.in_place = name.endswith("_") and not name.startswith("__")
        self.function, self.name = function, name.removesuffix("_") if self.in_place else name
        self.args, self.kwargs = args, kwargs
        self.leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self.entries = [entry_of(leaf) if isinstance(leaf, Tensor) else None for leaf in self.leaves]
        self.states: list[State] = [entry and entry.state for entry in self.entries]

    @cached_property
    def result(self) -> Any:
        """The result of the call, which runs on first access."""
        return self.function(*self.args, **self.kwargs)

    def again(self, given: Callable[[Any], Any]) -> Any:
        """Call the function again with other arguments."""
        args, kwargs = pytree.tree_unflatten([given(leaf) for leaf in self.leaves], self._spec)
        return self.function(*args, **kwargs)

    @property
    def operands(self) -> list[tuple[Tensor, Rows | None]]:
        """The tensor arguments. Constants have no rows."""
        return [
            (one.tensor, one.state if isinstance(one.state, Rows) else None) for one in self.entries if one
        ]

    def check_arguments(self) -> None:
        """Raise LostError for arguments that no rule supports."""
        if any(isinstance(argument, Shape) for argument in (*self.args, *self.kwargs.values())):
            raise LostError("takes the number of samples: use a function such as ones_like or view_as")
        if self.kwargs.get("out") is not None:
            raise LostError("writes into out=")
        if any(isinstance(state, Positions) for state in self.states) and self.name != "__getitem__":
            raise LostError(
                "takes the numbers of samples for anything else than to pick values of each sample"
            )

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its position or one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def replay_of(self, tensor: Any) -> Replay | None:
        """Return a function that computes one of the arguments for another micro-batch."""
        return next((entry.replay for entry in self.entries if entry and entry.tensor is tensor), None)

    def state_of(self, leaf: Any) -> State:
        """Return the state of one of the arguments."""
        return next((state for one, state in zip(self.leaves, self.states, strict=True) if one is leaf), None)

    def single(self) -> tuple[Tensor, Rows]:
        """Return the first operand, which must be the only one with samples."""
        (tensor, rows), *others = self.operands
        if rows is None or any(other for _, other in others):
            raise LostError("takes samples where constants are expected")
        return tensor, rows


def paired(call: Call) -> tuple[int, int, bool]:
    """Return the number of dimensions after broadcasting, the dimension of the samples, and whether it is regular.

    Raises:
        LostError: operands have their samples in different places, or a constant has one value for each.
    """
    found = [(tensor, rows) for tensor, rows in call.operands if rows is not None]
    places = {(tensor.dim() - rows.dim, tensor.shape[rows.dim]) for tensor, rows in found}
    if len(places) != 1:
        raise LostError("pairs samples with other samples")
    from_right, _ = places.pop()
    for tensor, rows in call.operands:
        if rows is None and tensor.dim() >= from_right and tensor.shape[-from_right] != 1:
            raise LostError("takes a tensor with a value for each sample that is not made from the batch")
    dims = max(tensor.dim() for tensor, _ in call.operands)
    return dims, dims - from_right, all(rows.regular for _, rows in found)


def elementwise(call: Call) -> Rows:
    """Rule for elementwise functions, with broadcasting."""
    _, dim, regular = paired(call)
    if not isinstance(call.result, Tensor):
        raise LostError("gives several values")
    return Rows(dim, regular)


def _along(position: int, default: int | None = None) -> Callable[[Call], Rows]:
    """A function that works along dimensions which it names, none of them that of samples."""

    def rule(call: Call) -> Rows:
        dims, dim, regular = paired(call)
        named = call.argument(position, "dim", "axis", default=default)
        if isinstance(named, bool) or not isinstance(named, int | tuple | list):
            raise LostError("works across samples")
        along = {operator.index(one) % dims for one in ([named] if isinstance(named, int) else named)}
        if not along or dim in along:
            raise LostError("works across samples")
        kept = pytree.tree_leaves(call.result)[0].dim() == dims
        return Rows(dim if kept else dim - sum(one < dim for one in along), regular)

    return rule


def _converted(call: Call) -> Rows:
    """The first operand with the type of another."""
    rows = call.operands[0][1]
    if rows is None:
        raise LostError("gives a constant the type of samples: name the dtype")
    return rows


def _of_many(call: Call) -> list[torch.Size]:
    """Return the shapes that the call would give for many more samples, which shows numbers that mean these."""
    tensor, rows = call.single()
    shape = list(tensor.shape)
    shape[rows.dim] = (shape[rows.dim] or 1) * _MANY
    probe = torch.empty(shape, device="meta")
    try:
        made = call.again(lambda leaf: probe if leaf is tensor else leaf)
    except Exception as error:
        raise LostError("does not take any number of samples: write -1 for it") from error
    return [view.shape for view in pytree.tree_leaves(made)]


def _moved(call: Call) -> list[Rows]:
    """A view with all of the samples, in their order, along another dimension or the same."""
    tensor, rows = call.single()
    few, places = tensor.shape[rows.dim], []
    for many, made in zip(_of_many(call), pytree.tree_leaves(call.result), strict=False):
        dims = [dim for dim, sizes in enumerate(zip(many, made.shape, strict=False)) if sizes[0] != sizes[1]]
        if len(many) != made.dim() or [(many[d], made.shape[d]) for d in dims] != [((few or 1) * _MANY, few)]:
            raise LostError("takes some samples and leaves others, or moves them")
        places.append(Rows(dims[0], rows.regular))
    return places


def _reshaped(call: Call) -> Rows:
    """A reshape that leaves the elements of samples in their order, and takes any number of samples."""
    rows, sizes = _converted(call), call.args[1:]
    if call.name in ("view_as", "reshape_as"):
        other = call.operands[1][1]
        free = other is not None and other.dim == 0
    elif call.name == "unflatten":
        dim, parts = call.argument(1, "dim"), call.argument(2, "sizes")
        free = dim % call.operands[0][0].dim() != 0 or tuple(parts)[:1] == (-1,)
    else:
        sizes = sizes[0] if sizes and isinstance(sizes[0], tuple | list) else sizes
        free = call.name == "flatten" or tuple(sizes[:1]) == (-1,)
    if rows.dim or not free or not call.result.dim():
        raise LostError("may put several samples into one row: write -1 for the first size")
    return rows


def _indexed(call: Call) -> Rows | list[Rows]:
    """Slices of dimensions other than that of the samples, or a mask over samples."""
    tensor, index = call.args
    if isinstance(index, tuple) and index and isinstance(call.state_of(index[0]), Positions):
        return _picked(call)
    if not isinstance(index, Tensor):
        if any(isinstance(part, Tensor | list) for part in (index if isinstance(index, tuple) else (index,))):
            raise LostError("picks by tensors of indices: use a mask")
        return _moved(call)
    whose = [rows and rows.dim for _, rows in call.operands]
    if index.dtype is not torch.bool or whose != [0, 0] or tensor.shape[0] != index.shape[0]:
        raise LostError("picks samples by an index")
    return Rows(0, False)


def _picked(call: Call) -> Rows:
    """Some values of each sample: ``tensor[positions, column]``."""
    tensor, (numbers, *columns) = call.args
    rows = call.state_of(tensor)
    fits = all(
        isinstance(column, int)
        or (isinstance(column, Tensor) and column.dim() == 1 and isinstance(call.state_of(column), Rows))
        for column in columns
    )
    if not isinstance(rows, Rows) or rows.dim or not fits or len(numbers) != len(tensor):
        raise LostError("picks samples by an index")
    return rows


def _numbered(call: Call) -> Positions:
    """The numbers of the samples."""
    if call.single()[1].dim:
        raise LostError("is not known to give the same for every micro-batch")
    return Positions()


def _one_hot(call: Call) -> Rows:
    """A number for each class, in a dimension after those of the classes."""
    rows, classes = call.single()[1], call.argument(1, "num_classes", default=-1)
    if not isinstance(classes, int) or classes < 1:
        raise LostError("counts the classes of one micro-batch: name num_classes")
    return rows


def _gathered(call: Call) -> Rows:
    """Values of each sample at places that are given for that sample."""
    (tensor, rows), (index, of_index) = call.operands
    dim = call.argument(1 if call.name == "gather" else 2, "dim")
    if rows is None or of_index is None or not isinstance(dim, int) or tensor.dim() != index.dim():
        raise LostError("picks by places that are not given for each sample")
    same = rows.dim == of_index.dim and tensor.shape[rows.dim] == index.shape[rows.dim]
    if not same or dim % tensor.dim() == rows.dim:
        raise LostError("picks values of other samples")
    return Rows(rows.dim, rows.regular and of_index.regular)


def _padded(call: Call) -> Rows:
    """Padding of dimensions other than that of the samples."""
    tensor, rows = call.single()
    widths, from_right = call.argument(1, "pad"), tensor.dim() - 1 - rows.dim
    if any(widths[2 * from_right : 2 * from_right + 2]):
        raise LostError("adds samples")
    return rows


def _spatial(call: Call) -> Rows:
    """A function that works along the last dimensions of ``[samples, channels, ...]``."""
    tensor, rows = call.single()
    if rows.dim or tensor.dim() < 3 or call.result.dim() != tensor.dim():
        raise LostError("works across samples")
    return rows


def _masked(call: Call) -> Rows:
    """What a mask picks from each sample, one sample after the other."""
    whose = [rows and rows.dim for _, rows in call.operands]
    if whose != [0, 0] or call.operands[0][0].shape != call.operands[1][0].shape:
        raise LostError("picks samples by an index")
    return Rows(0, False)


def names(text: str) -> frozenset[str]:
    """Split a text into words."""
    return frozenset(text.split())


def _rules() -> Iterator[tuple[frozenset[str], Callable[[Call], Rows | Positions | list[Rows]]]]:
    yield (
        names(
            "abs absolute neg negative sign exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow float_power sin "
            "cos tan atan atan2 sinh cosh tanh sigmoid logit logsigmoid softplus softsign relu relu6 leaky_relu elu "
            "selu gelu silu mish hardtanh erf xlogy clamp clip clamp_min clamp_max maximum minimum add sub subtract "
            "rsub mul multiply div divide true_divide floor_divide remainder reciprocal round floor ceil eq ne lt le "
            "gt ge less greater less_equal greater_equal not_equal logical_and logical_or logical_xor logical_not "
            "bitwise_and bitwise_or bitwise_not isnan isinf isfinite nan_to_num where masked_fill lerp logaddexp hypot "
            "float double half bfloat16 long int bool type cpu cuda clone contiguous detach zeros_like ones_like "
            "full_like expand_as __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __rsub__ "
            "__rdiv__ __rpow__ __radd__ __rmul__ __truediv__ __rtruediv__ __pow__"
        ),
        elementwise,
    )
    yield (
        names(
            "softmax log_softmax logsumexp sum mean amax amin max min argmax argmin all any cumsum cumprod std var"
        ),
        _along(1),
    )
    yield names("norm"), _along(2)
    yield names("normalize cosine_similarity"), _along(2, 1)
    yield names("to type_as"), _converted
    yield (
        names(
            "transpose permute movedim swapaxes t T mT unsqueeze squeeze narrow select expand unbind split chunk"
        ),
        _moved,
    )
    yield names("view reshape flatten unflatten view_as reshape_as"), _reshaped
    yield names("__getitem__"), _indexed
    yield names("positions"), _numbered
    yield names("one_hot"), _one_hot
    yield names("gather take_along_dim"), _gathered
    yield names("interpolate avg_pool1d avg_pool2d max_pool1d max_pool2d"), _spatial
    yield names("pad"), _padded
    yield names("masked_select"), _masked


RULES = {name: rule for group, rule in _rules() for name in group}
ALIKE = RULES.keys() | names("tensor as_tensor zeros ones full arange linspace eye tril triu __setitem__")
"""Functions whose result is the same for every micro-batch if their arguments are constants."""
