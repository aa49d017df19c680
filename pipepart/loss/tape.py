"""Records the torch calls that a loss function makes: what each one is given, and which call made that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..autograd.in_place import version
from ..autograd.own_copy import tensors
from ..capture.recorded.recording.tables import SIZES, words
from ..capture.recorded.refusal import line_of_user

_HARMLESS = words(
    "dim ndim ndimension dtype device layout requires_grad is_leaf is_cuda is_cpu is_floating_point is_complex "
    "is_contiguous element_size itemsize get_device is_sparse is_mps is_meta is_quantized is_nested is_xpu names "
    "retain_grad grad_fn __hash__"
)
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, type(...)}
_UNSEEN = "it uses a tensor that was computed where torch cannot be followed, as in compiled or scripted code"
_CHANGED = "it uses a tensor that was changed where torch cannot be followed, as by a custom Function"


_UNNUMBERED = -1, -1, None


class Ref:
    """Stands for a tensor that belongs to the batch or that a call made, by its number on the tape."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Lost(NamedTuple):
    """Stands for a tensor that cannot be traced back to samples, with the reason."""

    reason: str


class Call:
    """One torch call. Calls of the same function on the same arguments are equal.

    Args:
        tokens: the function, the form of the arguments, and one for each argument: equal for the same one.
        leaves: as the attribute.
        held: what tokens name by their identity, which holds as long as these live, beside the leaves.

    Attributes:
        function, name: what is called. In-place calls have the name of the plain function.
        in_place: whether it writes into its first argument.
        leaves: its arguments in a row, with a :class:`Ref` for each tensor that is no constant.
        line: of the user's code.
        numbers: of the tensors that it returned or wrote.
    """

    def __init__(self, tokens: list[Hashable], leaves: Sequence[Any], held: Sequence[Any]) -> None:
        self.function: Any = tokens[0]
        self.name, self.in_place = _described(self.function)
        self.leaves = leaves
        self.line = line_of_user()
        self.numbers = range(0)
        self._tokens, self._held = tokens, held
        self._gradients: list[bool] | None = None
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Call) and self._tokens == other._tokens and self._gradients == other._gradients
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((*self._tokens, *(self._gradients or ())))
        return self._hash

    def is_same(self, tokens: list[Hashable]) -> bool:
        """Return True for the tokens of the same function on the same arguments."""
        return self._tokens == tokens

    def returning(self, first: int, gradients: list[bool]) -> Call:
        """Return the call with its results: tensors numbered from ``first``, and whether each has a gradient."""
        numbers = range(first, first + len(gradients))
        if self._gradients is None:
            self.numbers, self._gradients = numbers, gradients
        elif self.numbers != numbers or self._gradients != gradients:  # than when it was recorded
            return Call(self._tokens, self.leaves, self._held).returning(first, gradients)
        return self

    @property
    def is_opaque(self) -> bool:
        """Whether an argument is an object that may change without a sign, such as an array."""
        return any(
            not isinstance(leaf, Tensor | Ref | Lost) and type(leaf) not in _PLAIN for leaf in self.leaves
        )

    def filled(self, leaves: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with others in the place of :attr:`leaves`."""
        return _nested(self._tokens[1], iter(leaves))

    @cached_property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments."""
        return self.filled(self.leaves)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its position or one of its names."""
        args, kwargs = self.arguments
        if position < len(args):
            return args[position]
        return next((kwargs[name] for name in names if name in kwargs), default)


@lru_cache(maxsize=1024)
def _described(function: Any) -> tuple[str, bool]:
    """Return the name of a torch function, and whether it writes into its first argument."""
    name = getattr(function, "__name__", repr(function))
    name = function.__self__.__name__ if name == "__get__" else name
    in_place = name.endswith("_") and not name.startswith("__")
    return (name.removesuffix("_") if in_place else name), in_place


def _flattened(nest: Any, leaves: list[Any]) -> Hashable:
    """Add the leaves of nested tuples, lists, dicts and slices to a list; return the form of the nest."""
    if isinstance(nest, Tensor) or type(nest) in _PLAIN:
        leaves.append(nest)
        return None
    if isinstance(nest, tuple):
        return tuple, tuple([_flattened(one, leaves) for one in nest])
    if isinstance(nest, list):
        return list, tuple([_flattened(one, leaves) for one in nest])
    if isinstance(nest, dict):
        return tuple(nest), tuple([_flattened(one, leaves) for one in nest.values()])
    if isinstance(nest, slice):
        return slice, tuple([_flattened(one, leaves) for one in (nest.start, nest.stop, nest.step)])
    leaves.append(nest)
    return None


def _nested(form: Any, leaves: Iterator[Any]) -> Any:
    """Return the nest with a form and leaves that :func:`_flattened` gave."""
    if form is None:
        return next(leaves)
    kind, forms = form
    parts = [_nested(one, leaves) for one in forms]
    if isinstance(kind, tuple):
        return dict(zip(kind, parts, strict=True))
    return slice(*parts) if kind is slice else kind(parts)


def mapped(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to all leaves of nested tuples, lists, dicts and slices."""
    leaves: list[Any] = []
    form = _flattened(nest, leaves)
    return _nested(form, map(change, leaves))


class Results(TorchFunctionMode):
    """Numbers the tensors that torch calls return as a tape does, for calls that are known.

    Args:
        given: the tensors of the batch.

    Attributes:
        values: the tensors.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.values = list(given)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _described(func)[0] not in _HARMLESS:
            self.values += tensors(result)
        return result


class Tape(TorchFunctionMode):
    """Records the torch calls within its ``with`` block.

    Args:
        originals: the tensors that others, by their identity, are copies of.
        earlier: the calls on another tape. A call that is the same as that at its place is not described anew.

    Attributes:
        calls: in their order.
        answers: what calls returned that returned no tensors, by their places.
        leaves: constants that get a gradient, by their identity.
        reads_sizes: whether any call gave the size of a tensor that is no constant.
    """

    def __init__(self, originals: Mapping[int, Tensor], earlier: Sequence[Call] = ()) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.answers: dict[int, Any] = {}
        self.leaves: dict[int, Tensor] = {}
        self.reads_sizes = False
        self.originals = originals
        self._earlier = earlier
        self._values: list[tuple[Tensor, int]] = []  # with their versions, -1 if written since
        self._seen: dict[int, tuple[int, int, Any]] = {}  # number, version and node by identity
        self._used: dict[int, tuple[Tensor, int]] = {}  # constants by identity, with their versions

    def give(self, tensor: Tensor) -> None:
        """Number a tensor of the batch."""
        self._note(tensor)

    def value(self, number: int) -> Tensor:
        """Return the tensor with a number."""
        return self._values[number][0]

    def is_written(self, leaf: Any) -> bool:
        """Return True if a tensor argument was written after the call that made it, or after its first use."""
        if isinstance(leaf, Ref):
            tensor, noted = self._values[leaf.number]
            return version(tensor) != noted
        return isinstance(leaf, Tensor) and version(leaf) != self._used[id(leaf)][1]

    def number_of(self, tensor: Any) -> int | Lost | None:
        """Return the number of a tensor, or why it has none; None for a constant."""
        seen = self._seen.get(id(tensor))
        if seen is None:
            return None if tensor.is_leaf else Lost(_UNSEEN)
        number, noted, node = seen
        return number if noted == version(tensor) and node is tensor.grad_fn else Lost(_CHANGED)

    def needed(self, number: int) -> list[Call]:
        """Return the calls that a tensor was computed by, in their order."""
        wanted, found = {number}, []
        for call in reversed(self.calls):
            if not wanted.isdisjoint(call.numbers):
                found.append(call)
                wanted.update(leaf.number for leaf in call.leaves if type(leaf) is Ref)
        return found[::-1]

    def key(self, number: int | None = None) -> Hashable:
        """Return a key that is equal on another tape with the same calls, or with those that a tensor needs."""
        return number, tuple(self.calls if number is None else self.needed(number))

    def forget(self) -> None:
        """Release the tensors that calls made."""
        self.answers.clear()
        self._values.clear()
        self._seen.clear()
        self._used.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.record(func, args, kwargs or {})

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, and add the call to the tape."""
        place = len(self.calls)
        call = self._earlier[place] if place < len(self._earlier) else None
        if call is None or call.function is not function or not self._repeats(call, args, kwargs):
            name, in_place = _described(function)
            if name in _HARMLESS and not in_place:
                return function(*args, **kwargs)
            call = self._call(function, (args, kwargs))
        if (call.in_place or call.name in SIZES) and type(call.leaves[0]) is Ref:
            if call.in_place and not args[0].dim():  # a term, whose gradient enters before it is written
                self._values[call.leaves[0].number] = args[0].clone(), -1
            self.reads_sizes |= call.name in SIZES
        result = self._run(call, args, kwargs)
        made = args[:1] if call.name == "__setitem__" else tensors(result)
        if not made:
            self.answers[len(self.calls)] = result
        self.calls.append(call.returning(len(self._values), [tensor.requires_grad for tensor in made]))
        for tensor in made:
            self._note(tensor)
        return result

    def _repeats(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True for the arguments of an earlier call, if they are plain values and tensors with numbers."""
        before, named = call.arguments
        if len(args) != len(before) or len(kwargs) != len(named):
            return False
        same = self._is_same
        return all(map(same, args, before)) and all(
            name in kwargs and same(kwargs[name], named[name]) for name in named
        )

    def _is_same(self, leaf: Any, before: Any) -> bool:
        if type(before) is not Ref:
            return leaf is before and type(leaf) in _PLAIN
        number, noted, node = self._seen.get(id(leaf), _UNNUMBERED)
        return number == before.number and noted == version(leaf) and node is leaf.grad_fn

    def _call(self, function: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Call:
        """Return a call: that of the earlier tape if it is the same."""
        leaves: list[Any] = []
        tokens: list[Hashable] = [function, _flattened(arguments, leaves)]
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[place] = self._tensor(leaf, tokens)
            else:
                kind = type(leaf)
                tokens.append((kind, leaf if kind in _PLAIN else id(leaf)))
        place, originals = (
            len(self.calls),
            [self.originals[id(leaf)] for leaf in leaves if id(leaf) in self.originals],
        )
        # An earlier call with the copy of a tensor has that of another replica.
        if not originals and place < len(self._earlier) and self._earlier[place].is_same(tokens):
            return self._earlier[place]
        return Call(tokens, leaves, originals)

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call.function(*args, **kwargs)

    def _tensor(self, leaf: Tensor, tokens: list[Hashable]) -> Ref | Lost | Tensor:
        """Return what stands for a tensor argument, and add its token."""
        number = self.number_of(leaf)
        if number is not None:
            tokens.append(number)
            return Ref(number) if isinstance(number, int) else number
        if leaf.requires_grad:
            self.leaves[id(leaf)] = leaf
        original = self.originals.get(id(leaf), leaf)
        self._used.setdefault(id(leaf), (leaf, version(leaf)))
        tokens.append((id(original), version(original), original.shape, leaf.requires_grad))
        return leaf

    def _note(self, tensor: Tensor) -> None:
        """Number a tensor."""
        noted = version(tensor)
        self._seen[id(tensor)] = len(self._values), noted, tensor.grad_fn
        self._values.append((tensor, noted))
