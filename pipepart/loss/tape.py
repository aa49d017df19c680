"""Records the torch calls that a loss function makes: what each one is given, and which call made that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
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


class Ref:
    """Stands for a tensor that belongs to the batch or that a call made, by its number on the tape."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Lost(NamedTuple):
    """Stands for a tensor that cannot be traced back to samples, with the reason."""

    reason: str


class Call:
    """One torch call.

    Attributes:
        function, name: what is called. In-place calls have the name of the plain function.
        in_place: whether it writes into its first argument.
        leaves: its arguments in a row, with a :class:`Ref` for each tensor that is no constant.
        tokens: equal for calls of the same function on the same arguments.
        line: of the user's code.
        numbers: of the tensors that it returned or wrote.
        answer: what it returned, if that holds no tensors.
    """

    def __init__(self, function: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.function = function
        self.name, self.in_place = _described(function)
        self.leaves: list[Any] = []
        self._nest = _flattened(arguments, self.leaves)
        self.tokens: list[Hashable] = [function, self._nest]
        self.line = ""
        self.numbers: list[int] = []
        self.answer: Any = None

    def filled(self, leaves: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with others in the place of :attr:`leaves`."""
        return _nested(self._nest, iter(leaves))

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


class Tape(TorchFunctionMode):
    """Records the torch calls within its ``with`` block.

    Args:
        originals: the tensors that others, by their identity, are copies of.

    Attributes:
        calls: in their order.
        leaves: constants that get a gradient, by their identity.
        constants: all that tokens name by their identity, which holds as long as these live.
        reads_sizes: whether any call gave the size of a tensor that is no constant.
        is_opaque: whether tokens name objects that may change without a sign, such as arrays.
    """

    def __init__(self, originals: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.leaves: dict[int, Tensor] = {}
        self.constants: dict[int, Any] = {}
        self.reads_sizes = self.is_opaque = False
        self.originals = originals
        self._values: list[tuple[Tensor, int]] = []  # with their versions, -1 if written since
        self._seen: dict[int, tuple[int, int, Any]] = {}  # number, version and node by identity
        self._used: dict[int, tuple[Tensor, int]] = {}  # constants by identity, with their versions

    def give(self, tensor: Tensor) -> int:
        """Return the number of a tensor of the batch."""
        return self._note(tensor)

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
        calls = self.calls if number is None else self.needed(number)
        return number, tuple([tuple(call.tokens) for call in calls])

    def forget(self) -> None:
        """Release the tensors that calls made."""
        self._values.clear()
        self._seen.clear()
        self._used.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.record(func, args, kwargs or {})

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, and add the call to the tape."""
        name, in_place = _described(function)
        if name in _HARMLESS and not in_place:
            return function(*args, **kwargs)
        call = Call(function, (args, kwargs))
        call.leaves = [self._argument(leaf, call.tokens) for leaf in call.leaves]
        call.line = line_of_user()
        first = call.leaves[0] if call.leaves else None
        if type(first) is Ref:
            if in_place and not args[0].dim():  # a term, whose gradient enters before it is written
                self._values[first.number] = args[0].clone(), -1
            self.reads_sizes |= name in SIZES
        result = self._run(call, args, kwargs)
        self.calls.append(call)
        made = args[:1] if name == "__setitem__" else tensors(result)
        call.numbers = [self._note(tensor) for tensor in made]
        call.tokens += [tensor.requires_grad for tensor in made]
        if not made:
            call.answer = result
        return result

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call.function(*args, **kwargs)

    def _argument(self, leaf: Any, tokens: list[Hashable]) -> Any:
        """Return what stands for an argument, and add its token."""
        if not isinstance(leaf, Tensor):
            plain = type(leaf) in _PLAIN
            if not plain:
                self.is_opaque = True
                self.constants[id(leaf)] = leaf
            tokens.append((type(leaf), leaf if plain else id(leaf)))
            return leaf
        number = self.number_of(leaf)
        if isinstance(number, int):
            tokens.append(number)
            return Ref(number)
        if number is not None:
            tokens.append(number)
            return number
        if leaf.requires_grad:
            self.leaves[id(leaf)] = leaf
        original = self.originals.get(id(leaf), leaf)
        self.constants[id(original)] = original
        self._used.setdefault(id(leaf), (leaf, version(leaf)))
        tokens.append((id(original), version(original), original.shape, leaf.requires_grad))
        return leaf

    def _note(self, tensor: Tensor) -> int:
        """Number a tensor."""
        number = len(self._values)
        noted = version(tensor)
        self._values.append((tensor, noted))
        self._seen[id(tensor)] = number, noted, tensor.grad_fn
        return number
