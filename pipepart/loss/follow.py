"""Follows a loss function while it runs on a real micro-batch, to see which sums and means it is made of.

Each tensor that comes from the batch is one of three. It holds samples: each index along one dimension belongs to one
sample. Or it is a sum over samples: what micro-batches give adds up. Or it is lost, with the reason. Functions that are
not in the tables of :mod:`pipepart.loss.operations` lose what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from . import sums, torch_losses
from .expressions import Expressions
from .extent import Extent
from .operations import FACTORIES, RANDOM, RULES, Call, LostError, Place, factory, major, names, pointwise
from .refusal import line_of_user
from .sums import Sum
from .terms import Predict

_HARMLESS = names(
    "dim ndim ndimension dtype device layout requires_grad is_leaf is_cuda is_cpu is_floating_point "
    "is_complex is_contiguous element_size itemsize get_device is_sparse is_mps is_meta is_quantized "
    "is_nested is_xpu names retain_grad"
)
_SHAPES = frozenset(("shape", "size", "numel", "nelement", "__len__"))
_CHANGES = frozenset(("__setitem__", "__set__", "register_hook"))
# What may be given any number, also behind a read of the number of samples: comparisons, bounds and powers.
_FREE = names("pow __pow__ clamp clamp_min clamp_max eq ne lt le gt ge __eq__ __ne__ masked_fill where")


class Samples(NamedTuple):
    """A tensor that holds samples; ``key`` names its values, ``replay`` makes them from another target."""

    place: Place
    key: Hashable
    replay: Predict | None = None


class Lost(NamedTuple):
    """A tensor of which it is not known how it comes from samples."""

    reason: str


Known = Samples | Sum | Lost


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is known of a tensor, as long as it stays what it was."""

    tensor: Tensor
    version: int
    node: Any
    known: Any


class _Ran(NamedTuple):
    """A call with what it is given: ``leaves`` are all its arguments in a row, ``known`` what is known of each."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]
    known: Sequence[Known | None]

    def sums(self) -> list[tuple[Any, Sum | None]]:
        """The arguments, with those that are sums over samples."""
        if any(isinstance(one, Samples) for one in self.known):
            raise LostError("combines a sum over samples with single samples")
        pairs = zip(self.leaves, self.known, strict=True)
        return [(leaf, one if isinstance(one, Sum) else None) for leaf, one in pairs]


class Follower(TorchFunctionMode):
    """Watches one call of a loss function.

    Args:
        samples: in the micro-batch.
        shared: the places in the target of what every micro-batch gets as it is.
        expressions: of the step.
        trusted: whether the function is known to keep samples apart, as a loss of torch's own is.

    Attributes:
        leaves: tensors that are not from the batch and get a gradient.
    """

    def __init__(
        self, samples: int, shared: set[int], expressions: Expressions, trusted: bool = False
    ) -> None:
        super().__init__()
        self.leaves: dict[int, Tensor] = {}
        self._samples = samples
        self._shared = shared
        self._expressions = expressions
        self._trusted = trusted
        self._known: dict[int, _Entry] = {}
        self._made: dict[int, _Entry] = {}
        self._read = self._leak = ""

    def begin(self, output: Any, target: Any) -> Self:
        """Names the tensors of the output and the target."""
        for index, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor):
                self._note(leaf, self._given(leaf, ("output", index), None))
        for index, leaf in enumerate(pytree.tree_leaves(target)):
            if isinstance(leaf, Tensor) and index not in self._shared and leaf.dim():
                self._note(leaf, self._given(leaf, ("target", index), partial(_leaf, index)))
        return self

    def found(self, value: Any) -> Sum | Lost:
        """What the loss that was returned is made of."""
        known = self._of(value)
        if isinstance(known, Lost):
            return known
        if isinstance(known, Sum) and known.terms and known.floor is None and not known.parts:
            return known
        return Lost(
            "what it returns is no sum or mean over samples, or was computed where torch cannot be followed"
        )

    def _given(self, leaf: Tensor, key: Hashable, replay: Predict | None) -> Known:
        number = self._expressions.number(key)
        if replay is not None:
            self._expressions.replays[number] = replay
        if self._trusted:
            return Samples(Place(0, "trusted"), number, replay)
        if leaf.dim() == 0:
            return Lost("it uses a scalar that the model returned, and what that is a mean of is not known")
        if leaf.shape[0] % self._samples and leaf.dim() > 1 and leaf.shape[1] == self._samples:
            return Samples(Place(1, major(self._samples)), number, replay)  # steps first, samples second
        if leaf.shape[0] % self._samples:
            shape = list(leaf.shape)
            return Lost(
                f"it is given shape {shape}, whose first dimension is not that of {self._samples} samples"
            )
        return Samples(Place(0, major(leaf.shape[0])), number, replay)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", repr(func))
        name = func.__self__.__name__ if name == "__get__" else name
        leaves, spec = pytree.tree_flatten((args, kwargs))
        known = [self._of(leaf) for leaf in leaves]
        bare = pytree.tree_unflatten([x.plain if isinstance(x, Extent) else x for x in leaves], spec)
        if not any(known):
            return self._constant(_Ran(func, name, args, kwargs, leaves, known), bare)
        if name in _HARMLESS:
            return func(*args, **kwargs)
        if name in _SHAPES:
            return self._shape(name, func(*args, **kwargs), args, known[0])
        in_place = _is_in_place(name)
        if in_place and args[0].dim() == 0:
            leaves[0] = args[0].clone()  # has the node and the value that the write replaces
            known[0] = _moved(known[0], args[0], leaves[0])
            if made_before := self._made.get(id(args[0])):
                self._made[id(leaves[0])] = _Entry(leaves[0], leaves[0]._version, None, made_before.known)
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        ran = _Ran(func, name.removesuffix("_") if in_place else name, args, kwargs or {}, leaves, known)
        lost = self._lost(leaves, known)
        if lost is None and torch_losses.is_one(func):
            result, made = self._torch_loss(ran, bare)
        else:
            result = func(*bare[0], **bare[1])
            made = lost or (
                self._outcome(ran, result) if isinstance(result, Tensor | tuple | list) else Lost("")
            )
        if in_place or name in _CHANGES:
            here = Lost(f"it changes a tensor with {name} at {line_of_user()}")
            self._note(bare[0][0], made if in_place and not isinstance(made, list) else here)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not tensors and name not in _CHANGES:
            self._read = self._read or f"{name.strip('_')} at {line_of_user()}"
        for index, tensor in enumerate(tensors):
            self._note(tensor, made[index] if isinstance(made, list) else made)
        return result

    def _lost(self, leaves: Sequence[Any], known: Sequence[Known | None]) -> Lost | None:
        """Why nothing can be known of a result, whatever the call."""
        for leaf, one in zip(leaves, known, strict=True):
            if isinstance(one, Lost):
                return one
            if isinstance(leaf, Tensor) and one is None and (lost := self._outside(leaf)):
                return lost
        if self._read:
            return Lost(f"it reads a value ({self._read}) before it is finished: read values last")
        return None

    def _outside(self, tensor: Tensor) -> Lost | None:
        """A tensor that does not come from the batch, as far as was seen."""
        if tensor.is_leaf:
            if tensor.requires_grad:
                self.leaves[id(tensor)] = tensor
            return None
        if id(tensor) in self._made:
            return None
        return Lost(
            "it uses a tensor that was computed where torch cannot be followed, as in compiled or scripted code"
        )

    def _outcome(self, ran: _Ran, result: Any) -> Known | list[Known]:
        """What is known of the result of a call."""
        key, replay = self._key(ran), _replay(ran)
        places: Place | list[Place] | None = None
        try:
            self._check_numbers(ran)
            if any(isinstance(one, Sum) for one in ran.known):
                return sums.combined(ran.name, ran.func, ran.args, ran.kwargs, result, ran.sums(), key)
            call = self._call(ran, result)
            total = sums.reduced(call, key, replay, self._expressions.replays.get)
            if total is not None:
                return total
            if ran.name not in RULES:
                raise LostError("is not known to keep samples apart")
            places = RULES[ran.name](call)
            if places is None:
                raise LostError("makes a constant of samples")
        except LostError as error:
            return _lost_in(ran.name, error)
        several = places if isinstance(places, list) else None
        if isinstance(result, Tensor):
            if replay is not None:
                self._expressions.replays[key] = replay
            return Samples(several[0] if several else places, key, replay)  # type: ignore[arg-type]
        of_each = several or [places] * len(result)
        return [
            Samples(place, self._expressions.number((key, index)))  # type: ignore[arg-type]
            for index, place in enumerate(of_each)
        ]

    def _check_numbers(self, ran: _Ran) -> None:
        """Raises LostError for a number that may come from the number of samples."""
        scales = RULES.get(ran.name) is pointwise or any(isinstance(one, Sum) for one in ran.known)
        numbers = any(type(leaf) in (int, float) for leaf in ran.leaves)
        if self._leak and scales and numbers and ran.name not in _FREE:
            raise LostError(f"takes a number, after {self._leak} was read")
        of_samples = any(isinstance(leaf, Extent) for leaf in ran.leaves)
        if (
            of_samples
            and RULES.get(ran.name) is pointwise
            and not any(isinstance(one, Sum) for one in ran.known)
        ):
            raise LostError("takes the number of samples")

    def _torch_loss(self, ran: _Ran, bare: Any) -> tuple[Any, Known]:
        """A call of one of torch's losses, and what is known of its result."""
        call = self._call(ran, None)._replace(args=bare[0], kwargs=bare[1])
        key = self._key(ran)
        try:
            if any(isinstance(one, Sum) for one in ran.known):
                raise LostError("takes a sum over samples, which differs from that of the mini-batch")
            result, found = torch_losses.called(call, key, self._trusted, self._expressions.replays.get)
            return result, Samples(found, key) if isinstance(found, Place) else found
        except LostError as error:
            return ran.func(*bare[0], **bare[1]), _lost_in(ran.name, error)

    def _call(self, ran: _Ran, result: Any) -> Call:
        tensors = [
            (leaf, one) for leaf, one in zip(ran.leaves, ran.known, strict=True) if isinstance(leaf, Tensor)
        ]
        operands = [(leaf, one.place if isinstance(one, Samples) else None) for leaf, one in tensors]
        keys = [one.key if isinstance(one, Samples) else None for _, one in tensors]
        return Call(ran.func, ran.name, ran.args, ran.kwargs, result, operands, self._samples, keys)

    def _constant(self, ran: _Ran, bare: Any) -> Any:
        """A call that takes nothing from the batch, but perhaps the number of samples."""
        result = ran.func(*bare[0], **bare[1])
        if not isinstance(result, Tensor):
            return result
        lost = [self._outside(leaf) for leaf in ran.leaves if isinstance(leaf, Tensor)]
        made: Known | None = next(filter(None, lost), None)
        if any(isinstance(leaf, Extent) for leaf in ran.leaves):
            made = made or self._of_extent(ran, result)
        elif ran.name.removesuffix("_") in RANDOM:
            made = Lost(f"it draws random numbers with {ran.name} at {line_of_user()}")
        if made is not None:
            self._note(result, made)
        elif (
            ran.name == "__setitem__"
            or _is_in_place(ran.name)
            or not any(result is leaf for leaf in ran.leaves)
        ):
            self._made[id(result)] = _Entry(result, result._version, None, self._key(ran))
        return result

    def _of_extent(self, ran: _Ran, result: Tensor) -> Known:
        """A new tensor that the number of samples goes into."""
        lost = Lost(f"it makes a tensor from the number of samples with {ran.name} at {line_of_user()}")
        if ran.name not in FACTORIES:
            return lost
        try:
            place = factory(self._call(ran, result))
        except LostError:
            return lost
        return Samples(place, self._key(ran)) if place else lost

    def _key(self, ran: _Ran) -> int:
        """The number of a call's result."""
        tokens = [self._token(leaf, one) for leaf, one in zip(ran.leaves, ran.known, strict=True)]
        return self._expressions.number((ran.name, *tokens))

    def _token(self, leaf: Any, known: Known | None = None) -> Hashable:
        """What names an argument of a call in every micro-batch of a step."""
        if isinstance(known, Samples | Sum):
            return known.key
        if isinstance(leaf, Tensor):
            made = self._made.get(id(leaf))
            return made.known if made and made.version == leaf._version else self._expressions.outside(leaf)
        if isinstance(leaf, Extent):
            return "extent"
        if isinstance(leaf, slice):
            return "slice", *map(self._token, (leaf.start, leaf.stop, leaf.step))
        plain = isinstance(leaf, int | float | str | torch.dtype | torch.device | type(None))
        return type(leaf).__name__, leaf if plain else id(leaf)

    def _shape(self, name: str, result: Any, args: tuple[Any, ...], known: Known | None) -> Any:
        """An extent or all of them; that of samples can be told from other numbers."""
        if self._trusted or not isinstance(known, Samples):
            return result
        dim, ndim = known.place.dim, args[0].dim()
        if name == "__len__":
            if dim == 0:
                self._leak = self._leak or f"len() of samples (at {line_of_user()}; write .shape[0])"
            return result
        if isinstance(result, torch.Size):
            return torch.Size(
                [self._told(size) if index == dim else size for index, size in enumerate(result)]
            )
        of_samples = name != "size" or (len(args) > 1 and args[1] % ndim == dim)
        return self._told(result) if of_samples else result

    def _told(self, size: int) -> Extent:
        return Extent(size, 1, self._leaked)

    def _leaked(self) -> None:
        self._leak = self._leak or f"the number of samples at {line_of_user()}"

    def _of(self, leaf: Any) -> Known | None:
        entry = self._known.get(id(leaf)) if isinstance(leaf, Tensor) else None
        if entry is None:
            return None
        if entry.version != _version(leaf) or entry.node is not leaf.grad_fn:
            return Lost(
                "it uses a tensor that was changed where torch cannot be followed, as by a custom Function"
            )
        return entry.known

    def _note(self, tensor: Tensor, known: Known) -> None:
        self._known[id(tensor)] = _Entry(tensor, _version(tensor), tensor.grad_fn, known)


def _version(tensor: Tensor) -> int:
    """How often a tensor has been written; 0 for inference tensors, whose writes torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _replay(ran: _Ran) -> Predict | None:
    """The same call on what comes from another target; None if it takes anything else from the batch."""
    replays = [getattr(one, "replay", None) for one in ran.known]
    if any(one is not None and replay is None for one, replay in zip(ran.known, replays, strict=True)):
        return None
    if any(isinstance(leaf, Extent) for leaf in ran.leaves):
        return None
    spec = pytree.tree_structure((ran.args, ran.kwargs))

    def replay(target: Any) -> Any:
        given = [leaf if one is None else one(target) for leaf, one in zip(ran.leaves, replays, strict=True)]
        args, kwargs = pytree.tree_unflatten(given, spec)
        return ran.func(*args, **kwargs)

    return replay


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("__")


def _moved(known: Known | None, tensor: Tensor, copy: Tensor) -> Known | None:
    """What is known of a sum whose tensor has been copied."""
    if not isinstance(known, Sum):
        return known
    terms = tuple(t._replace(tensor=copy) if t.tensor is tensor else t for t in known.terms)
    return known._replace(terms=terms)


def _lost_in(name: str, error: LostError) -> Lost:
    return Lost(f"{name.strip('_')} at {line_of_user()} {error}")


def _leaf(index: int, target: Any) -> Tensor:
    return pytree.tree_leaves(target)[index]
