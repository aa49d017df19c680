"""Looks at every operation on a worker's thread: what it is given must live on the worker's device.

Under autograd and the backward, which on the CPU runs on the thread that asked for it, operations come here one by one.
A tensor's home is a mark on its storage, so that views, detached tensors and what autograd saves have that of the
tensor they come from; what an operation makes anew lives on the worker's device. A tensor without a mark is the host's:
operations on such alone are the host's, and one without dimensions may be read anywhere, as on accelerators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from .ledger import OTHER, Ledger, mark_of, storages
from .suspects import held_by

_aten = torch.ops.aten

# These carry numbers from device to device on accelerators, too.
_CARRIERS = frozenset({_aten.copy_.default, _aten._foreach_copy_.default})
# Their indices may be the host's.
_INDEXED = frozenset(
    {
        _aten.index.Tensor,
        _aten._unsafe_index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
    }
)
# What `torch.tensor` and `torch.from_numpy` end in: they make a tensor though they are given one.
_LIFTS = frozenset({_aten.lift_fresh.default, _aten.lift.default})


class Watch(TorchDispatchMode):
    """Entered on the worker's thread for a whole run.

    Args:
        ledger: of the worker's device.
        layers: of the model, by their names, to say which has a tensor that is not where it should be.
    """

    def __init__(self, ledger: Ledger, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.ledger = ledger
        self._layers = layers
        self._is_off = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nothing is looked at within the block."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def is_home(self, tensor: Tensor) -> bool:
        """Whether the tensor lives on this device."""
        marks = [mark_of(storage) for storage in storages(tensor)]
        return all(mark is not None and mark.ledger.device == self.ledger.device for mark in marks)

    def adopt(self, tensor: Tensor, what: str = "a copy") -> None:
        """Has the tensor live here.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        for storage in list(storages(tensor)):  # what finds the next looks at where the ones before live
            self.ledger.enter(storage, OTHER, lambda: f"{what} of shape {tuple(tensor.shape)}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        if _is_view(func):  # reads no number, unless it has to copy
            made = func(*args, **kwargs)
            unmarked = list(_unmarked(made))
            if not unmarked or self._look(func, args, kwargs):
                return made
        else:
            from_host = self._look(func, args, kwargs)
            made = func(*args, **kwargs)
            if from_host:
                return made
            unmarked = _unmarked(made)
        for tensor, storage in unmarked:
            self.ledger.enter(storage, OTHER, partial(_made_by, func, tensor))
        return made

    def _look(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Refuses what an accelerator would; returns whether the operation is one of the host alone."""
        if func in _LIFTS or func in _CARRIERS:
            return func in _CARRIERS and not any(map(self.is_home, _tensors(args)))
        own = self.ledger.device
        here = False
        hosts: list[Tensor] = []
        for tensor in _tensors([*args, *kwargs.values()] if kwargs else args):
            for storage in storages(tensor):
                mark = mark_of(storage)
                if mark is None:
                    hosts.append(tensor)
                elif mark.ledger.device == own:
                    here = True
                else:
                    raise RuntimeError(self._elsewhere(func, tensor, mark.ledger.device))
        if not hosts or not here:
            return bool(hosts)
        for tensor in hosts:
            written = tensor is args[0] and _writes_first(func)
            if written or (tensor.dim() and not (func in _INDEXED and tensor is not args[0])):
                raise RuntimeError(self._on_host(func, tensor))
        return False

    def _elsewhere(self, func: Any, tensor: Tensor, home: str) -> str:
        held = held_by(tensor, self._layers)
        return (
            f"expected all tensors on one device: {func} runs on {self.ledger.device} and was given a tensor of shape "
            f"{tuple(tensor.shape)} that lives on {home}{f': {held}' if held else ''}. Copy it over, "
            "tensor.to(x.device), or pass it from layer to layer with what they return"
        )

    def _on_host(self, func: Any, tensor: Tensor) -> str:
        held = held_by(tensor, self._layers) or (
            "made outside of the step, or in it without device=x.device. Copy it over, tensor.to(x.device), or make "
            "it a buffer of its layer, self.register_buffer(name, tensor)"
        )
        return (
            f"expected all tensors on one device: {func} runs on {self.ledger.device} and was given a tensor of shape "
            f"{tuple(tensor.shape)} that lives on none, in the memory of the host: {held}"
        )


class Moves(TorchFunctionMode):
    """What layers, losses and hooks copy to a device or to the host, or make there, which is the same on the CPU.

    What is made without a word about the device, as by ``torch.ones(4)``, is the host's.

    Args:
        watch: of the worker.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and (
            "device" in kwargs or any(isinstance(arg, torch.device | str | int | Tensor) for arg in args[1:2])
        ):
            return self._here(func(*args, **kwargs))
        if func is Tensor.type_as:
            return self._here(func(*args, **kwargs))
        if func is Tensor.cpu and args[0].device.type == "cpu":
            return _Moved.apply(args[0], self._watch, True)
        if func not in _device_constructors():
            return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            return self._here(func(*args, **kwargs))
        if any(map(self._watch.is_home, _tensors(args))):
            return func(*args, **kwargs)
        with self._watch.off():
            return func(*args, **kwargs)

    def _here(self, made: Any) -> Any:
        """What lives on the device now, wherever it was before."""
        if not isinstance(made, Tensor) or made.device.type != "cpu" or self._watch.is_home(made):
            return made
        return _Moved.apply(made, self._watch, False)


class _Moved(torch.autograd.Function):
    """A copy on a device or in the host's memory; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, watch: Watch, to_host: bool) -> Tensor:
        ctx.watch, ctx.to_host = watch, to_host
        return _moved(tensor, watch, to_host)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _moved(gradients[0], ctx.watch, not ctx.to_host), None, None


def _moved(tensor: Tensor, watch: Watch, to_host: bool) -> Tensor:
    with watch.off():
        made = tensor.clone()
    if not to_host:
        watch.adopt(made)
    return made


def _tensors(nest: Iterable[Any] | Any) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation, which nest them once at most."""
    if not isinstance(nest, list | tuple):
        return
    for item in nest:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from (one for one in item if isinstance(one, Tensor))


def _unmarked(made: Any) -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
    """What an operation has made anew, or the host has."""
    for tensor in _tensors((made,) if isinstance(made, Tensor) else made):
        for storage in storages(tensor):
            if mark_of(storage) is None:
                yield tensor, storage


def _made_by(func: Any, tensor: Tensor) -> str:
    return f"{func}, which makes a tensor of shape {tuple(tensor.shape)},"


@cache
def _is_view(func: Any) -> bool:
    return any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns)


def _writes_first(func: Any) -> bool:
    written = func._schema.arguments[0].alias_info
    return written is not None and written.is_write
