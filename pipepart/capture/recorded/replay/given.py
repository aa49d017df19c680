"""Given: the arguments of a recorded call, with numbers in place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..python_state.access import PLAIN

Env = MutableMapping[int, Any]  # the tensors of a replay by their numbers
DeviceRule = Callable[[Any], Any]  # replaces a recorded device by that of the stage
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

_COMPARED = (*(kind for kind in PLAIN if kind is not torch.device), list, set, frozenset)


class Ref(NamedTuple):
    """A tensor of a recording, by its number."""

    number: int


class Reading(NamedTuple):
    """A Python number in the output of a model: the function that reads it, and the number of the tensor."""

    func: Callable[..., Any]
    number: int


class Slice(NamedTuple):
    """A slice whose ends may be refs."""

    start: Any
    stop: Any
    step: Any


class Given:
    """The arguments of a call, with refs in place of tensors.

    Args:
        args, kwargs: the arguments.
        ref: returns the number of a tensor.

    Attributes:
        leaves: the arguments in the order of their nest.
        has_device: whether one of them is a device.
        positional: how many positional arguments there are.
    """

    __slots__ = ("_names", "_refs", "_slices", "_spec", "has_device", "leaves", "positional")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], ref: Callable[[Tensor], int]) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # Most calls have no nests in their arguments and are filled without pytree.
        flat = spec.num_leaves == len(args) + len(kwargs) and not any(
            isinstance(value, tuple | list | dict) and type(value) is not torch.Size
            for value in (*args, *kwargs.values())
        )
        self._spec = None if flat else spec
        self.positional, self._names = len(args), tuple(kwargs)
        self.leaves = [_stored(leaf, ref) for leaf in leaves]
        self.has_device = any(isinstance(leaf, torch.device) for leaf in leaves)
        self._refs = [(i, leaf.number) for i, leaf in enumerate(self.leaves) if type(leaf) is Ref]
        self._slices = [(i, leaf) for i, leaf in enumerate(self.leaves) if type(leaf) is Slice]

    def numbers(self) -> Iterator[int]:
        """Return the numbers of the tensors that :meth:`filled` needs."""
        for _, number in self._refs:
            yield number
        for _, leaf in self._slices:
            for part in leaf:
                if type(part) is Ref:
                    yield part.number

    def replaced(self, leaves: Mapping[int, Any]) -> Given:
        """Return the arguments with some values (not tensors) replaced."""
        copied = copy(self)
        copied.leaves = [leaves.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        return copied

    @property
    def only(self) -> int:
        """The number of the first tensor, for a call with only one."""
        return self._refs[0][1]

    def filled(self, env: Env, device: DeviceRule | None = None) -> tuple[Any, Any]:
        """Return positional and keyword arguments for a replay."""
        leaves = self.leaves.copy()
        for index, number in self._refs:
            leaves[index] = env[number]
        for index, leaf in self._slices:
            leaves[index] = slice(*(env[part.number] if type(part) is Ref else part for part in leaf))
        if device is not None:
            leaves = [device(leaf) for leaf in leaves]
        if self._spec is not None:
            return pytree.tree_unflatten(leaves, self._spec)
        count = self.positional
        return leaves[:count], dict(zip(self._names, leaves[count:], strict=True)) if self._names else {}


def same_value(was: Any, now: Any) -> bool:
    """Return True if two Python values are equal. Objects that cannot be compared are equal if their types are.

    So are devices, as a replay may run on another one.
    """
    if type(was) is not type(now) or isinstance(was, Tensor):
        return False
    return not isinstance(was, _COMPARED) or bool(was == now or (was != was and now != now))


def resolved(leaf: Any, env: Env) -> Any:
    """Return the tensor of a ref or the number of a reading; any other value is returned unchanged."""
    if type(leaf) is Ref:
        return env[leaf.number]
    return leaf.func(env[leaf.number]) if type(leaf) is Reading else leaf


def _stored(leaf: Any, ref: Callable[[Tensor], int]) -> Any:
    if isinstance(leaf, Tensor):
        return Ref(ref(leaf))
    if isinstance(leaf, slice):
        return Slice(*(_stored(part, ref) for part in (leaf.start, leaf.stop, leaf.step)))
    return leaf
