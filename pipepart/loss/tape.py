"""Records the torch calls that a loss function makes: what each one is given, and which call made that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..autograd.in_place import version
from ..autograd.own_copy import tensors
from ..capture.recorded.recording.tables import words
from ..capture.recorded.refusal import line_of_user

_HARMLESS = words(
    "dim ndim ndimension dtype device layout requires_grad is_leaf is_cuda is_cpu is_floating_point is_complex "
    "is_contiguous element_size itemsize get_device is_sparse is_mps is_meta is_quantized is_nested is_xpu names "
    "retain_grad grad_fn __hash__"
)
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


class Shape(tuple[int, ...]):
    """The shape of a tensor, which notes the dimensions whose extents are read."""

    read: set[int]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            self.read.update(range(len(self))[index])
            return tuple(self)[index]
        self.read.add(range(len(self))[index])
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        self.read.update(range(len(self)))
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            self.read.update(range(len(self)))
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self)


def _note_all(name: str) -> Callable[..., Any]:
    """Return a method of tuples that reads all extents."""

    def method(self: Shape, *args: Any) -> Any:
        self.read.update(range(len(self)))
        return getattr(super(Shape, self), name)(*args)

    return method


for _name in words("__add__ __mul__ __rmul__ __lt__ __le__ __gt__ __ge__ __contains__ index count"):
    setattr(Shape, _name, _note_all(_name))


class Call:
    """One torch call.

    Attributes:
        function, name: what is called. In-place calls have the name of the plain function.
        in_place: whether it writes into its first argument.
        args, kwargs: its arguments, with a :class:`Ref` for each tensor that is no constant.
        leaves: all arguments in a row.
        tokens: equal for calls of the same function on the same arguments.
        line: of the user's code.
        numbers: of the tensors that it returned or wrote.
        answer: what it returned, if that holds no tensors.
        before: the value of a scalar that it wrote.
    """

    def __init__(self, function: Any) -> None:
        name = getattr(function, "__name__", repr(function))
        name = function.__self__.__name__ if name == "__get__" else name
        self.in_place = name.endswith("_") and not name.startswith("__")
        self.function, self.name = function, name.removesuffix("_") if self.in_place else name
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.leaves: list[Any] = []
        self.tokens: tuple[Hashable, ...] = ()
        self.line = ""
        self.numbers: list[int] = []
        self.answer: Any = None
        self.before: Tensor | None = None

    def filled(self, leaf: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``leaf`` applied to each of :attr:`leaves`, in their order."""
        return mapped(self.args, leaf), mapped(self.kwargs, leaf)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its position or one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)


class Tape(TorchFunctionMode):
    """Records the torch calls within its ``with`` block.

    Args:
        originals: the tensors that others, by their identity, are copies of.

    Attributes:
        calls: in their order.
        leaves: constants that get a gradient, by their identity.
        constants: all that tokens name by their identity, which holds as long as these live.
    """

    def __init__(self, originals: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.leaves: dict[int, Tensor] = {}
        self.constants: dict[int, Any] = {}
        self.originals = originals
        self._given = 0
        self._values: list[tuple[Tensor, int]] = []  # with their versions
        self._seen: dict[int, tuple[int, int, Any]] = {}  # number, version and node by identity
        self._versions: dict[int, int] = {}  # of constants, by identity
        self._held: list[Tensor] = []  # so that no other tensor gets the identity of one that was seen

    def give(self, tensor: Tensor) -> int:
        """Return the number of a tensor of the batch."""
        self._given += 1
        return self._note(tensor, tensor)

    def value(self, number: int) -> Tensor:
        """Return the tensor with a number."""
        return self._values[number][0]

    def is_written(self, leaf: Any) -> bool:
        """Return True if a tensor argument was written after the call that made it, or after its first use."""
        if isinstance(leaf, Ref):
            tensor, noted = self._values[leaf.number]
            return version(tensor) != noted
        return isinstance(leaf, Tensor) and version(leaf) != self._versions[id(leaf)]

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

    def key(self, number: int) -> Hashable:
        """Return a key that is equal on another tape if the tensor was computed alike."""
        return number, tuple([call.tokens for call in self.needed(number)])

    @property
    def shapes(self) -> Hashable:
        """The shapes of the tensors of the batch."""
        return tuple([value.shape for value, _ in self._values[: self._given]])

    def forget(self) -> None:
        """Release the tensors that calls made."""
        self._values.clear()
        self._seen.clear()
        self._held.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = Call(func)
        if call.name in _HARMLESS and not call.in_place:
            return func(*args, **kwargs)
        tokens: list[Hashable] = [call.function, *kwargs]

        def noted(leaf: Any) -> Any:
            leaf, token = self._argument(leaf)
            call.leaves.append(leaf)
            tokens.append(token)
            return leaf

        call.args, call.kwargs = mapped(args, noted), mapped(kwargs, noted)
        call.tokens, call.line = tuple(tokens), line_of_user()
        if call.in_place and isinstance(args[0], Tensor) and not args[0].dim():
            call.before = args[0].detach().clone()
        result = self._run(call, args, kwargs)
        self.calls.append(call)
        return self._returned(call, args, result)

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call.function(*args, **kwargs)

    def _argument(self, leaf: Any) -> tuple[Any, Hashable]:
        """Return what stands for an argument, and its token."""
        if not isinstance(leaf, Tensor):
            plain = isinstance(leaf, int | float | str | torch.dtype | torch.device | type(None))
            if not plain:
                self.constants[id(leaf)] = leaf
            return leaf, (type(leaf), leaf if plain else id(leaf))
        number = self.number_of(leaf)
        if isinstance(number, int):
            return Ref(number), (Ref, number)
        if number is not None:
            return number, number
        if leaf.requires_grad:
            self.leaves[id(leaf)] = leaf
        original = self.originals.get(id(leaf), leaf)
        self._held.append(leaf)
        self.constants[id(original)] = original
        self._versions.setdefault(id(leaf), version(leaf))
        return leaf, (id(original), version(original))

    def _returned(self, call: Call, args: tuple[Any, ...], result: Any) -> Any:
        """Number the tensors of a result; return what the loss gets."""
        made = args[:1] if call.name == "__setitem__" else tensors(result)
        if isinstance(result, torch.Size):
            result = Shape(result)
            result.read = set()
        if not made:
            call.answer = result
            return result
        if type(result) is Tensor and not result.dim() and not call.in_place and self._reduces(call):
            # In-place code in the loss must not change the tensor that a backward starts from.
            copy = result.clone()
            call.numbers.append(self._note(result, copy))
            return copy
        call.numbers.extend(self._note(tensor, tensor) for tensor in made)
        return result

    def _reduces(self, call: Call) -> bool:
        return any(type(leaf) is Ref and self.value(leaf.number).dim() for leaf in call.leaves)

    def _note(self, value: Tensor, seen: Tensor) -> int:
        """Number a tensor, which the loss sees as ``seen``."""
        number = len(self._values)
        self._values.append((value, version(value)))
        self._held.append(seen)
        self._seen[id(seen)] = number, version(seen), seen.grad_fn
        return number


def mapped(nest: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply a function to all leaves of nested tuples, lists, dicts and slices."""
    if isinstance(nest, list):
        return [mapped(one, leaf) for one in nest]
    if isinstance(nest, tuple) and not isinstance(nest, Lost):
        return tuple([mapped(one, leaf) for one in nest])
    if isinstance(nest, dict):
        return {name: mapped(one, leaf) for name, one in nest.items()}
    if isinstance(nest, slice):
        return slice(*[mapped(one, leaf) for one in (nest.start, nest.stop, nest.step)])
    return leaf(nest)
