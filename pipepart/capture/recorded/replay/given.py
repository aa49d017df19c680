"""The arguments of a recorded call: where its tensors and numbers come from, and all other values as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .numbers import Integer, Real, Ref, extent, plain

Env = MutableMapping[int, Any]  # the tensors of a replay by their numbers
DeviceRule = Callable[[Any], Any]  # replaces a recorded device by that of the stage

_COMPARED = (bool, int, float, complex, str, bytes, type(None), list)


class Slice(NamedTuple):
    """A slice whose ends may be refs or numbers with a source."""

    start: Any
    stop: Any
    step: Any


class Given:
    """The arguments of a call, with refs in place of tensors.

    Args:
        args, kwargs: the arguments.
        ref: returns the number of a tensor.
    """

    __slots__ = ("_leaves", "_names", "_others", "_positional", "_refs", "_spec", "has_device")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], ref: Callable[[Tensor], int]) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # Most calls have no nests in their arguments and are filled without pytree.
        flat = spec.num_leaves == len(args) + len(kwargs) and not any(
            isinstance(value, tuple | list | dict) and type(value) is not torch.Size
            for value in (*args, *kwargs.values())
        )
        self._spec = None if flat else spec
        self._positional, self._names = len(args), tuple(kwargs)
        self._leaves = [_stored(leaf, ref) for leaf in leaves]
        self.has_device = any(isinstance(leaf, torch.device) for leaf in leaves)
        self._sort()

    def _sort(self) -> None:
        self._refs = [(i, leaf.number) for i, leaf in enumerate(self._leaves) if type(leaf) is Ref]
        self._others = [(i, leaf) for i, leaf in enumerate(self._leaves) if _is_open(leaf)]

    def settle(self) -> None:
        """Forget the sources of numbers: they are constants from here on."""
        self._leaves = [_settled(leaf) for leaf in self._leaves]
        self._sort()

    def numbers(self, sizes: bool = True) -> Iterator[int]:
        """Return the numbers of the tensors that :meth:`filled` needs.

        Args:
            sizes: count tensors of which only the size is needed.
        """
        for _, number in self._refs:
            yield number
        for _, leaf in self._others:
            yield from _numbers(leaf, sizes)

    def with_rows(self) -> Given | None:
        """Return the arguments with a tensor in place of the first one, if that is its extent along dimension 0."""
        first = self._leaves[0] if self._positional == 1 and self._spec is None else None
        if not isinstance(first, Integer) or first.source.operation is not extent or first.source.operands[1]:
            return None
        made = copy(self)
        made._leaves = [first.source.operands[0], *self._leaves[1:]]
        made._sort()
        return made

    def with_free_size(self) -> Given | None:
        """Return the arguments of a view with -1 as the first size, if that was computed from the sizes of tensors."""
        sizes = self._leaves[1:]
        if len(sizes) == 1 and type(sizes[0]) is torch.Size:
            sizes = list(sizes[0])
        if not sizes or not isinstance(sizes[0], Integer) or any(size == -1 for size in sizes[1:]):
            return None
        made = copy(self)
        made._leaves = [self._leaves[0], -1, *sizes[1:]]
        made._spec, made._positional, made._names = None, len(made._leaves), ()
        made._sort()
        return made

    def same_constants(self, other: Given) -> bool:
        """Return True if no plain number or value differs from that of another call; numbers with a source may."""
        return len(self._leaves) == len(other._leaves) and all(
            map(_same_constant, self._leaves, other._leaves)
        )

    def settled(self) -> Given:
        """Return a copy whose numbers are constants."""
        made = copy(self)
        made.settle()
        return made

    @property
    def values(self) -> list[Any]:
        """The arguments in the order of their nest, refs in place of tensors."""
        return [plain(leaf) for leaf in self._leaves]

    @property
    def only(self) -> Any:
        """The ref of a call with one tensor."""
        return next(leaf for leaf in self._leaves if type(leaf) is Ref)

    def filled(self, env: Env, device: DeviceRule | None = None) -> tuple[Any, Any]:
        """Return positional and keyword arguments for a replay."""
        leaves = self._leaves.copy()
        for index, number in self._refs:
            leaves[index] = env[number]
        for index, leaf in self._others:
            leaves[index] = resolved(leaf, env)
        if device is not None:
            leaves = [device(leaf) for leaf in leaves]
        if self._spec is not None:
            return pytree.tree_unflatten(leaves, self._spec)
        count = self._positional
        return leaves[:count], dict(zip(self._names, leaves[count:], strict=True)) if self._names else {}


def same_value(was: Any, now: Any) -> bool:
    """Return True if a Python value is what it was. Objects that cannot be compared count as the same."""
    if isinstance(was, Tensor) or isinstance(now, Tensor):
        return False
    if not isinstance(was, _COMPARED):
        return type(was) is type(now)
    return type(plain(was)) is type(plain(now)) and bool(was == now or (was != was and now != now))


def _stored(leaf: Any, ref: Callable[[Tensor], int]) -> Any:
    if isinstance(leaf, Tensor):
        return Ref(ref(leaf))
    if isinstance(leaf, slice):
        return Slice(*(_stored(part, ref) for part in (leaf.start, leaf.stop, leaf.step)))
    return leaf


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, Slice | torch.Size) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same_constant, one, other))
    if type(one) in (Ref, Integer, Real) or type(other) in (Ref, Integer, Real):
        return type(one) is type(other)
    return same_value(one, other)


def _is_open(leaf: Any) -> bool:
    if type(leaf) is torch.Size:
        return any(isinstance(size, Integer) for size in leaf)
    return type(leaf) is Slice or isinstance(leaf, Integer | Real)


def resolved(leaf: Any, env: Env) -> Any:
    """Return the tensor of a ref, and a number with a source as its tensors give it now; anything else as it is."""
    if type(leaf) is Slice:
        return slice(*(resolved(part, env) for part in leaf))
    if type(leaf) is Ref:
        return env[leaf.number]
    if type(leaf) is torch.Size:
        return torch.Size([resolved(size, env) for size in leaf])
    return _read_again(leaf, env) if isinstance(leaf, Integer | Real) else leaf


def _read_again(number: Integer | Real, env: Env) -> Any:
    try:
        return number.source.value(env)
    except RuntimeError:
        if any(env[one].is_meta for one in number.source.numbers()):
            return number.plain  # tensors on the meta device have no values
        raise


def _settled(leaf: Any) -> Any:
    return Slice(*map(_settled, leaf)) if type(leaf) is Slice else plain(leaf)


def _numbers(leaf: Any, sizes: bool) -> Iterator[int]:
    if type(leaf) is Ref:
        yield leaf.number
    elif isinstance(leaf, Integer | Real):
        yield from leaf.source.numbers(sizes)
    elif type(leaf) is Slice or type(leaf) is torch.Size:
        for part in leaf:
            yield from _numbers(part, sizes)
