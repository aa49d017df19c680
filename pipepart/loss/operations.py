"""The functions of torch that keep samples apart, and where each leaves the dimension of samples.

What is not in these tables may mix samples, and makes a loss unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .extent import Extent


class Place(NamedTuple):
    """Where the samples of a tensor are.

    Attributes:
        dim: each index along this dimension belongs to one sample.
        order: which index belongs to which sample. Two tensors may be paired index by index if theirs are equal.
    """

    dim: int
    order: Hashable


class LostError(Exception):
    """A function mixes samples, or is not known to keep them apart."""


class Call(NamedTuple):
    """A call of torch on tensors that hold samples.

    Attributes:
        function, args, kwargs, result: as called; the result is None for one that has not run.
        operands: the tensors among the arguments, with the place of their samples; None for constants.
        samples: in this micro-batch.
        keys: what identifies the values of the operands.
    """

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    operands: Sequence[tuple[Tensor, Place | None]]
    samples: int
    keys: Sequence[Hashable]

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by its position or one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def first(self) -> tuple[Tensor, Place]:
        """The first operand, which must be the only one with samples."""
        (tensor, place), *others = self.operands
        if place is None or any(other is not None for _, other in others):
            raise LostError("takes samples where constants are expected")
        return tensor, place


def major(extent: int) -> Hashable:
    """The order in which all of one sample comes before all of the next."""
    return "major", extent


def pointwise(call: Call) -> Place:
    """Each element of the result comes from the same elements of the operands, broadcast or not."""
    right, order = _paired(call)
    return Place(call.result.dim() - right, order)


def _paired(call: Call) -> tuple[int, Hashable]:
    """How far from the right the samples lie, in all operands alike."""
    found = {(t.dim() - place.dim, place.order) for t, place in call.operands if place is not None}
    if len(found) != 1:
        raise LostError("pairs samples with other samples")
    right, order = found.pop()
    for tensor, place in call.operands:
        if place is None and tensor.dim() >= right:
            rows = next(t.shape[p.dim] for t, p in call.operands if p is not None)
            if tensor.shape[-right] != 1 or rows == 1:
                raise LostError("takes a tensor with a value for each sample that is not made from the batch")
    return right, order


def _converted(call: Call) -> Place:
    """The first operand with the type of another."""
    if call.operands[0][1] is None:
        raise LostError("gives a constant the type of samples: name the dtype")
    return call.operands[0][1]


def movement(call: Call) -> list[Place]:
    """A view that is seen by its strides: the same call on a tensor that has a stride along samples alone."""
    tensor, place = call.first()
    extent = tensor.shape[place.dim] + 1  # one more, so that a bound that is the number of samples shows
    shape, strides = [*tensor.shape], [0] * tensor.dim()
    shape[place.dim], strides[place.dim] = extent, 1_000_003
    probe = torch.empty_strided(shape, strides, device="meta")
    try:
        seen = call.function(probe, *call.args[1:], **call.kwargs)
    except Exception as error:
        raise LostError("moves samples") from error
    places = []
    for view, made in zip(pytree.tree_leaves(seen), pytree.tree_leaves(call.result), strict=False):
        dims = [dim for dim, stride in enumerate(view.stride()) if stride == 1_000_003]
        if (
            len(dims) != 1
            or view.shape[dims[0]] != extent
            or view.dim() != made.dim()
            or view.storage_offset()
        ):
            raise LostError("takes some samples and leaves others, or moves them")
        places.append(Place(dims[0], place.order))
    return places


def reshaping(call: Call) -> Place:
    """A reshape that leaves each sample's elements in rows of their own."""
    tensor, (dim, order) = call.operands[0][0], _converted(call)
    old, new = tuple(tensor.shape), tuple(call.result.shape)
    if dim == 0 and order == major(old[0]) and new and new[0] and new[0] % call.samples == 0:
        return Place(0, major(new[0]))
    if new[: dim + 1] == old[: dim + 1]:
        return Place(dim, order)
    if (
        new and order == major(old[dim]) and new[0] == prod(old[: dim + 1])
    ):  # rows of samples, not sample by sample
        return Place(0, ("rows", old[: dim + 1]))
    raise LostError("puts several samples into one row")


def indexing(call: Call) -> Place | list[Place]:
    """Slices beside the samples, or a mask over them."""
    index = call.args[1]
    if not isinstance(index, Tensor):
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, Tensor | list) for part in parts):
            raise LostError("picks by tensors of indices: use torch.gather, or a mask")
        return movement(call)
    (_, place), (_, other) = call.operands
    if place is None or other is None or index.dtype is not torch.bool or other != place:
        raise LostError("picks samples by an index")
    return Place(0, ("masked", call.keys[1], place))  # what the same mask picks is in the same order


def along(position: int, default: int | None = None) -> Callable[[Call], Any]:
    """A function that works along dimensions which it names, none of them that of samples."""

    def rule(call: Call) -> Place:
        tensor, place = call.first()
        dims = named_dims(call, tensor.dim(), position, default)
        if not dims or place.dim in dims:
            raise LostError("works across samples")
        gone = 0 if call_keeps(tensor, call.result) else sum(dim < place.dim for dim in dims)
        return Place(place.dim - gone, place.order)

    return rule


def call_keeps(tensor: Tensor, result: Any) -> bool:
    """Return True if a reduction has kept the dimensions that it reduces."""
    return pytree.tree_leaves(result)[0].dim() == tensor.dim()


def named_dims(call: Call, ndim: int, position: int, default: int | None = None) -> set[int]:
    """The dimensions that a call names, counted from 0; none if it works over all."""
    dims = call.argument(position, "dim", "axis", default=default)
    if isinstance(dims, bool) or not isinstance(dims, int | tuple | list):
        return set()
    return {operator.index(dim) % ndim for dim in ([dims] if isinstance(dims, int) else dims)}


def _picked(call: Call) -> Place:
    """``gather``: each sample's own indices, along another dimension."""
    tensor, index = call.args[0], call.argument(2, "index", "indices")
    (_, place), *others = call.operands
    dim = call.argument(1, "dim")
    if not isinstance(dim, int) or place is None or not others or index is None:
        raise LostError("picks by an index")
    if others[0][1] != place or dim % tensor.dim() == place.dim:
        raise LostError("picks across samples")
    return place


def _product(call: Call) -> Place:
    """A matrix product with constants from the right, or of a matrix for each sample."""
    (tensor, place), *others = call.operands
    if place is None or place.dim == tensor.dim() - 1:
        raise LostError("multiplies samples with each other")
    if all(other is None for _, other in others) and (call.name == "linear" or others[0][0].dim() <= 2):
        return place
    if (
        len(others) == 1
        and others[0][1] == place
        and place.dim < tensor.dim() - 2
        and others[0][0].dim() == tensor.dim()
    ):
        return place
    raise LostError("multiplies samples with each other")


def _two_along(default: int) -> Callable[[Call], Place]:
    """A distance or likeness of two tensors along one dimension, which goes."""

    def rule(call: Call) -> Place:
        right, order = _paired(call)
        ndim = max(tensor.dim() for tensor, _ in call.operands)
        dim = call.argument(2, "dim", default=default) if call.name == "cosine_similarity" else default
        if dim % ndim == ndim - right or call.kwargs.get("keepdim"):
            raise LostError("works across samples")
        return Place(ndim - right - (dim % ndim < ndim - right), order)

    return rule


def _trailing(call: Call) -> Place:
    """A normalisation over the last dimensions."""
    tensor, place = call.first()
    if place.dim >= tensor.dim() - len(call.argument(1, "normalized_shape")):
        raise LostError("works across samples")
    return place


def _embedded(call: Call) -> Place:
    """A row of a constant table for each element."""
    index, place = next((t, p) for t, p in call.operands if p is not None)
    if index is not call.argument(0, "input") or call.argument(3, "max_norm") is not None:
        raise LostError("looks up in a table made from samples")
    return place


def _one_hot(call: Call) -> Place:
    classes = call.argument(1, "num_classes", default=-1)
    if not isinstance(classes, int) or classes < 1:
        raise LostError("its number of classes depends on the samples: give num_classes")
    return call.first()[1]


def _joined(call: Call) -> Place:
    """Tensors of the same samples side by side."""
    right, order = _paired(call)
    tensors = [tensor for tensor, _ in call.operands]
    if len(call.operands) != len(call.args[0]) or any(place is None for _, place in call.operands):
        raise LostError("joins samples with other values")
    ndim, dim = tensors[0].dim(), tensors[0].dim() - right
    at = call.argument(1, "dim", default=0)
    if call.name == "stack":
        at %= ndim + 1
        return Place(dim + (at <= dim), order)
    if at % ndim == dim:
        raise LostError("joins along the dimension of samples")
    return Place(dim, order)


def factory(call: Call) -> Place | None:
    """A new tensor of one value, by the extents that it is called with; None for a constant."""
    sizes = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if type(leaf) in (int, Extent)]
    dims = [dim for dim, size in enumerate(sizes) if isinstance(size, Extent)]
    if not dims:
        return None
    if len(dims) > 1 or dims[0] >= call.result.dim() or sizes[dims[0]].degree != 1:
        raise LostError("makes a tensor from the number of samples")
    return Place(dims[0], major(call.result.shape[dims[0]]))


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def _dunders(text: str) -> list[str]:
    return [f"__{name}__" for name in text.split()]


Rule = Callable[[Call], "Place | list[Place] | None"]
FACTORIES = names("zeros ones full new_zeros new_ones new_full")
RANDOM = names(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial poisson"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        [
            *names(
                "abs absolute neg negative positive sign sgn exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square"
            ),
            *names(
                "pow float_power sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh atan2 sigmoid logit"
            ),
            *names(
                "logsigmoid softplus softsign relu relu6 leaky_relu elu selu celu gelu silu mish hardtanh"
            ),
            *names(
                "hardsigmoid hardswish hardshrink softshrink tanhshrink threshold erf erfc erfinv lgamma digamma"
            ),
            *names(
                "xlogy clamp clip clamp_min clamp_max maximum minimum fmax fmin add sub subtract rsub mul multiply"
            ),
            *names(
                "div divide true_divide floor_divide remainder fmod reciprocal round floor ceil trunc frac eq ne"
            ),
            *names(
                "lt le gt ge less greater less_equal greater_equal not_equal logical_and logical_or logical_xor"
            ),
            *names(
                "logical_not bitwise_and bitwise_or bitwise_xor bitwise_not isnan isinf isfinite nan_to_num where"
            ),
            *names("masked_fill lerp addcmul addcdiv logaddexp logaddexp2 hypot copysign float double half"),
            *names("bfloat16 long int bool type cpu cuda clone contiguous detach zeros_like ones_like"),
            *names("full_like expand_as dropout data"),
            *_dunders("eq ne lt le gt ge and or xor invert rsub rdiv rpow radd rmul truediv rtruediv pow"),
        ],
        pointwise,
    ),
    **dict.fromkeys(
        [
            *names(
                "transpose permute movedim moveaxis swapaxes swapdims t T mT unsqueeze squeeze narrow select expand"
            ),
            *names("unbind split chunk tensor_split"),
        ],
        movement,
    ),
    **dict.fromkeys(names("view reshape flatten unflatten view_as reshape_as"), reshaping),
    **dict.fromkeys(
        names(
            "softmax log_softmax logsumexp sum mean amax amin max min argmax argmin cumsum all any prod var std"
        ),
        along(1),
    ),
    **dict.fromkeys(names("topk kthvalue"), along(2, -1)),
    **dict.fromkeys(names("sort argsort"), along(1, -1)),
    **dict.fromkeys(names("to type_as"), _converted),
    "norm": along(2),
    "normalize": along(2, 1),
    "vector_norm": along(2),
    "linalg_vector_norm": along(2),
    **dict.fromkeys(names("gather take_along_dim"), _picked),
    **dict.fromkeys(names("linear matmul __matmul__ bmm mm"), _product),
    "cosine_similarity": _two_along(1),
    "pairwise_distance": _two_along(-1),
    **dict.fromkeys(names("layer_norm rms_norm"), _trailing),
    "embedding": _embedded,
    "one_hot": _one_hot,
    **dict.fromkeys(names("cat concat concatenate stack"), _joined),
    "__getitem__": indexing,
    **dict.fromkeys(names("new_zeros new_ones new_full"), factory),
}
