"""Records the torch calls that a loss function makes: what each one is given, and which call made that."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
PLAIN = {
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(...),
}
"""Types of arguments that nothing changes."""

_UNSEEN = "it uses a tensor that was computed where torch cannot be followed, as in compiled or scripted code"
_CHANGED = "it uses a tensor that was changed where torch cannot be followed, as by a custom Function"


class Ref(NamedTuple):
    """Stands for a tensor that belongs to the batch or that a call made, by its number on the tape."""

    number: int


class Lost(NamedTuple):
    """Stands for a tensor that cannot be traced back to samples, with the reason."""

    reason: str


@dataclass(eq=False, slots=True)
class Call:
    """One torch call. Calls with the same key are the same, as long as the one that was first lives.

    Attributes:
        key: of the function, its arguments and its results.
        function, name: what is called. In-place calls have the name of the plain function.
        in_place: whether it writes into its first argument.
        form, leaves: its arguments in a row, with a :class:`Ref` for each tensor that is no constant.
        numbers: of the tensors that it returned or wrote.
        line: of the user's code.
    """

    key: tuple[Hashable, ...]
    function: Any
    name: str
    in_place: bool
    form: Any
    leaves: Sequence[Any]
    numbers: range = range(0)
    line: str = ""

    def filled(self, leaves: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with others in the place of :attr:`leaves`."""
        return _nested(self.form, iter(leaves))

    @property
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
    if name.startswith("__"):
        return name, name == "__setitem__" or name in ("__iadd__", "__isub__", "__imul__", "__itruediv__")
    return name.removesuffix("_"), name.endswith("_")


def _flattened(nest: Any, leaves: list[Any]) -> Hashable:
    """Add the leaves of nested tuples, lists, dicts and slices to a list; return the form of the nest."""
    if isinstance(nest, tuple | list):
        kind = tuple if isinstance(nest, tuple) else list
        return kind, tuple([_flattened(item, leaves) for item in nest])
    if isinstance(nest, dict):
        return tuple(nest), tuple([_flattened(item, leaves) for item in nest.values()])
    if isinstance(nest, slice):
        return slice, tuple([_flattened(item, leaves) for item in (nest.start, nest.stop, nest.step)])
    leaves.append(nest)
    return None


def _nested(form: Any, leaves: Iterator[Any]) -> Any:
    """Return the nest with a form and leaves that :func:`_flattened` gave."""
    if form is None:
        return next(leaves)
    kind, forms = form
    parts = [_nested(each, leaves) for each in forms]
    if isinstance(kind, tuple):
        return dict(zip(kind, parts, strict=True))
    return slice(*parts) if kind is slice else kind(parts)


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
        earlier: the calls on another tape, which are not described again if they are the same.

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
        self._used: dict[int, int] = {}  # versions of constants by identity, at their first use

    def give(self, tensor: Tensor) -> None:
        """Number a tensor, of the batch or made by a call."""
        noted = version(tensor)
        self._seen[id(tensor)] = len(self._values), noted, tensor.grad_fn
        self._values.append((tensor, noted))

    def value(self, number: int) -> Tensor:
        """Return the tensor with a number."""
        return self._values[number][0]

    def is_written(self, leaf: Ref | Tensor) -> bool:
        """Return True if a tensor was written after the call that made it, or a constant after its first use."""
        if isinstance(leaf, Ref):
            tensor, noted = self._values[leaf.number]
            return version(tensor) != noted
        return version(leaf) != self._used[id(leaf)]

    def number_of(self, tensor: Tensor) -> int | Lost | None:
        """Return the number of a tensor, or why it has none; None for a constant."""
        seen = self._seen.get(id(tensor))
        if seen is None:
            return None if tensor.is_leaf else Lost(_UNSEEN)
        number, noted, node = seen
        return number if noted == version(tensor) and node is tensor.grad_fn else Lost(_CHANGED)

    def needed(self, *numbers: int) -> list[int]:
        """Return the places of the calls that tensors were computed by, in their order."""
        wanted, calls = {*numbers}, []
        for place, call in reversed([*enumerate(self.calls)]):
            if not wanted.isdisjoint(call.numbers):
                calls.append(place)
                wanted.update(leaf.number for leaf in call.leaves if type(leaf) is Ref)
        return calls[::-1]

    def key(self) -> Hashable:
        """Return a key that is equal on another tape with the same calls."""
        return tuple([call.key for call in self.calls])

    def forget(self) -> None:
        """Release the tensors that calls made."""
        self.answers.clear()
        self._values.clear()
        self._seen.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, in_place = _described(func)
        if name in _HARMLESS and not in_place:
            return func(*args, **kwargs)
        leaves: list[Any] = []
        key: list[Hashable] = [func, _flattened((args, kwargs), leaves)]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[number] = self._tensor(leaf, key)
            else:
                kind = type(leaf)
                key.append((kind, leaf if kind in PLAIN else id(leaf)))
        if leaves and type(leaves[0]) is Ref:
            if in_place and not args[0].dim():  # a term, whose gradient enters before it is written
                self._values[leaves[0].number] = args[0].clone(), -1
            self.reads_sizes |= name in SIZES
        call = Call((), func, name, in_place, key[1], leaves)
        result = self._run(call, args, kwargs)
        results = args[:1] if name == "__setitem__" else tensors(result)
        first, place = len(self._values), len(self.calls)
        if not results:
            self.answers[place] = result
        for tensor in results:
            self.give(tensor)
        call.key = *key, first, *[tensor.requires_grad for tensor in results]
        if place < len(self._earlier) and self._earlier[place].key == call.key:
            call = self._earlier[place]
        else:
            call.numbers, call.line = range(first, first + len(results)), line_of_user()
        self.calls.append(call)
        return result

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call.function(*args, **kwargs)

    def _tensor(self, leaf: Tensor, key: list[Hashable]) -> Ref | Lost | Tensor:
        """Return what stands for a tensor argument, and add it to the key of its call."""
        number = self.number_of(leaf)
        if number is not None:
            known = Ref(number) if isinstance(number, int) else number
            key.append(known)
            return known
        if leaf.requires_grad:
            self.leaves[id(leaf)] = leaf
        self._used.setdefault(id(leaf), version(leaf))
        original = self.originals.get(id(leaf), leaf)
        key.append((id(original), version(original), original.shape, leaf.requires_grad))
        return leaf
