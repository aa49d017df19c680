"""One recorded call: a function of torch or a whole module, where its arguments come from, and what it returned."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....autograd.own_copy import tensors
from ..python_state.value_key import value_key
from ..refusal import CaptureError
from .numbers import Integer, Real, Ref, extent, plain, positions

Env = MutableMapping[int, Any]  # the tensors of a replay by their numbers
Autocast = tuple[tuple[str, bool, torch.dtype], ...]  # for each kind of device

HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))
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

    def pattern(self, rank: Callable[[int], int]) -> Hashable:
        """Return a key of the arguments, in which ``rank`` replaces the numbers of tensors."""
        leaves = tuple(_pattern(leaf, rank) for leaf in self._leaves)
        return leaves, self._positional, self._names, None if self._spec is None else repr(self._spec)

    def filled(self, env: Env, device: DeviceRule | None = None) -> tuple[Any, Any]:
        """Return positional and keyword arguments for a replay."""
        leaves = self._leaves.copy()
        for index, number in self._refs:
            leaves[index] = env[number]
        for index, leaf in self._others:
            leaves[index] = _opened(leaf, env)
        if device is not None:
            leaves = [device(leaf) for leaf in leaves]
        if self._spec is not None:
            return pytree.tree_unflatten(leaves, self._spec)
        count = self._positional
        return leaves[:count], dict(zip(self._names, leaves[count:], strict=True)) if self._names else {}


DeviceRule = Callable[[Any], Any]  # replaces a recorded device by that of the stage


@dataclass(slots=True, eq=False)
class Call:
    """One call of a recording.

    Attributes:
        func: the function or module.
        given: its arguments.
        outs: what it returned, leaf by leaf: refs for tensors, other values as they were.
        spec: how the leaves were nested; None for one tensor.
        new: the numbers that the call made, unlike those of tensors that it was given and returned.
        writes: the numbers of tensors that it wrote in place.
        grad: whether gradients were enabled.
        autocast: as it was.
        module: path of the module in the user's model; empty for a function.
        line: of the user's code.
        draws: whether it draws random numbers.
        counts: whether it is given a number that depends on the number of samples and does not say so.
    """

    func: Callable[..., Any]
    given: Given
    outs: tuple[Any, ...]
    spec: Any
    new: frozenset[int]
    writes: frozenset[int]
    grad: bool
    autocast: Autocast
    module: str = ""
    line: str = ""
    draws: bool = False
    counts: bool = False

    @property
    def name(self) -> str:
        """The name of the function or the path of the module."""
        return self.module or getattr(self.func, "__name__", repr(self.func))

    def for_any_samples(self) -> Call:
        """Return the call without the number of samples, where that makes no difference.

        ``torch.arange(len(x))`` becomes one call on ``x``, and ``x.view(len(x) * n, 5)`` becomes ``x.view(-1, 5)``. A
        loss that is followed shows then what it does with its samples.
        """
        if self.func is torch.arange and (given := self.given.with_rows()) is not None:
            return replace(self, func=positions, given=given)
        if self.name in ("view", "reshape") and (given := self.given.with_free_size()) is not None:
            return replace(self, func=getattr(Tensor, self.name), given=given)
        return self

    @property
    def reads(self) -> bool:
        """Whether it returned no tensor: a value that the model has read."""
        return not (
            self.module or self.writes or self.name in HOOKS or any(type(out) is Ref for out in self.outs)
        )

    def run(self, env: Env, func: Callable[..., Any], ambient: Autocast, device: DeviceRule | None) -> None:
        """Call it again and store what it returns.

        Raises:
            CaptureError: it returned other values than when it was recorded.
        """
        args, kwargs = self.given.filled(env, device)
        if self.counts:  # who follows a loss must see it
            next((len(tensor) for tensor in env.values() if tensor.dim()), None)
        try:
            if self.autocast == ambient and (self.grad or not torch.is_grad_enabled()):
                result = func(*args, **kwargs)
            else:
                with self._modes(ambient):
                    result = func(*args, **kwargs)
        except RuntimeError:
            if self.reads and any(tensor.is_meta for tensor in tensors((args, kwargs))):
                return  # the recording was made from real arguments, of which it was asked
            raise
        if self.spec is None:
            env[self.outs[0].number] = result
            return
        leaves = pytree.tree_leaves(result)
        if len(leaves) != len(self.outs):
            raise CaptureError(f"{self._where()} returned another structure than when the model was recorded")
        for out, leaf in zip(self.outs, leaves, strict=True):
            if type(out) is Ref:
                env[out.number] = leaf
            elif not same_value(out, leaf):
                raise CaptureError(
                    f"{self._where()} gave {plain(leaf)!r:.60}, and {plain(out)!r:.60} when the model was recorded: "
                    "the code that follows may take another branch. Keep the module that reads it whole, layers=[...], "
                    "or move the code that reads into a module of its own, or compute with tensors (torch.where)"
                )

    def _modes(self, ambient: Autocast) -> ExitStack:
        stack = ExitStack()
        if not self.grad:
            stack.enter_context(torch.no_grad())
        if self.autocast != ambient:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack

    def _where(self) -> str:
        return f"module {self.module!r}" if self.module else f"{self.name}() at {self.line}"


def autocast_now() -> Autocast:
    """Return the state of autocast for the CPU and the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def same_value(was: Any, now: Any) -> bool:
    """Return True if a Python value is what it was. Objects that cannot be compared count as the same."""
    if isinstance(was, Tensor) or isinstance(now, Tensor):
        return False
    if not isinstance(was, _COMPARED):
        return type(was) is type(now)
    return type(plain(was)) is type(plain(now)) and bool(was == now or (was != was and now != now))


def is_plain_function(call: Call) -> bool:
    """Return True for a function that computes new tensors or values from its arguments and nothing else."""
    return not (call.module or call.draws or call.writes or isinstance(call.func, nn.Module))


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


def _opened(leaf: Any, env: Env) -> Any:
    if type(leaf) is Slice:
        return slice(*(_opened(part, env) for part in leaf))
    if type(leaf) is Ref:
        return env[leaf.number]
    if type(leaf) is torch.Size:
        return torch.Size([_opened(size, env) for size in leaf])
    return _read_again(leaf, env) if isinstance(leaf, Integer | Real) else leaf


def _read_again(number: Integer | Real, env: Env) -> Any:
    try:
        return number.source.value(env)
    except RuntimeError:
        if any(env[one].is_meta for one in number.source.numbers()):
            return number.plain  # tensors on the meta device have no values
        raise


def _pattern(leaf: Any, rank: Callable[[int], int]) -> Hashable:
    if type(leaf) is Ref:
        return Ref(rank(leaf.number))
    if type(leaf) is Slice:
        return Slice(*(_pattern(part, rank) for part in leaf))
    return value_key(plain(leaf))


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
