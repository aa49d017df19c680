"""StrictDevice: checks each operation of one virtual device's worker, and counts the memory of new tensors.

A tag on a tensor's storage says where the tensor lives, so views, detached tensors and what autograd saves live where
their base does. The rules, as on a GPU:

- An operation takes tensors of one device. It may also read host tensors without dimensions, and host indices.
- What an operation creates lives on the device of its worker; if all its inputs are the host's, on the host.
- ``copy_`` may copy between devices. ``tensor.to(device)`` and ``graph_cut.move`` copy to the worker's device,
  ``tensor.cpu()`` to the host. A factory such as ``torch.ones(4)`` without ``device=`` creates a host tensor.

On the CPU, autograd runs a backward on the thread that calls it, so forwards and backwards are both checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from ..autograd.dispatch_mode import DispatchMode
from ..autograd.own_copy import own_copy, tensors
from .memory import OTHER, Ledger, owner_of, storages, tag_of

_aten = torch.ops.aten
_COPIES = frozenset({_aten.copy_.default, _aten._foreach_copy_.default})
_LIFTS = frozenset({_aten.lift_fresh.default, _aten.lift.default})  # how `torch.tensor` ends
_INDEXED = frozenset(
    {
        _aten.index.Tensor,
        _aten._unsafe_index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
    }
)


class StrictDevice(DispatchMode):
    """Entered by the device's worker, and by no other thread, around what an action computes.

    Args:
        ledger: counts the device's memory.
        layers: named layers, searched for the owner of a tensor that is on the wrong device.
    """

    def __init__(self, ledger: Ledger, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.ledger = ledger
        self._layers = layers
        self._unchecked = False

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Do not check or count operations within the block."""
        before, self._unchecked = self._unchecked, True
        try:
            yield
        finally:
            self._unchecked = before

    def is_home(self, tensor: Tensor) -> bool:
        """Return True if the tensor lives on this device."""
        tags = [tag_of(storage) for storage in storages(tensor)]
        return all(tag is not None and tag.ledger is self.ledger for tag in tags)

    def bring(self, message: Any) -> Any:
        """Return the message itself if all its tensors live here, otherwise a copy on this device.

        Raises:
            torch.OutOfMemoryError: the device's limit would be exceeded.
        """
        if all(map(self.is_home, tensors(message))):
            return message
        with self.unchecked():
            return self.received(message)

    def received(self, message: Any) -> Any:
        """Return a copy of a message on this device; called by the worker that sends it, or by this one unchecked.

        Raises:
            torch.OutOfMemoryError: the device's limit would be exceeded.
        """
        copied = own_copy(message)
        for tensor in tensors(copied):
            if not self.is_home(tensor):  # two tensors may share one storage
                self._adopt(tensor, "a message with a tensor")
        return copied

    def copied(self, tensor: Tensor, to_host: bool) -> Tensor:
        """Return a copy of a tensor on this device or on the host.

        Raises:
            torch.OutOfMemoryError: the device's limit would be exceeded.
        """
        with self.unchecked():
            copy = tensor.clone()
        if not to_host:
            self._adopt(copy, "a copy")
        return copy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._unchecked:
            return func(*args, **kwargs)
        is_view = _is_view(func)  # reads no values, so it is checked only if it had to copy
        on_host = not is_view and self._is_on_host(func, args, kwargs)
        result = func(*args, **kwargs)
        if on_host:
            return result
        new = [
            value for value in _flat(result) if any(tag_of(storage) is None for storage in storages(value))
        ]
        if new and not (is_view and self._is_on_host(func, args, kwargs)):
            for tensor in new:
                self._adopt(tensor, f"{func}, which makes a tensor")
        return result

    def _adopt(self, tensor: Tensor, what: str) -> None:
        for storage in list(storages(tensor)):
            self.ledger.enter(storage, OTHER, lambda: f"{what} of shape {tuple(tensor.shape)}")

    def _is_on_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if all inputs are the host's.

        Raises:
            RuntimeError: the inputs live on different devices.
        """
        if func in _LIFTS or func in _COPIES:
            return func in _COPIES and not any(map(self.is_home, _flat(args)))
        here = False
        of_host: list[Tensor] = []
        for tensor in _flat([*args, *kwargs.values()] if kwargs else args):
            for storage in storages(tensor):
                tag = tag_of(storage)
                if tag is None:
                    of_host.append(tensor)
                elif tag.ledger is self.ledger:
                    here = True
                else:
                    raise RuntimeError(self._mixed(func, tensor, tag.ledger.device))
        if not of_host or not here:
            return bool(of_host)
        for tensor in of_host:
            written = tensor is args[0] and _writes_first(func)
            is_index = func in _INDEXED and tensor is not args[0]
            if written or (tensor.dim() and not is_index):
                raise RuntimeError(self._mixed(func, tensor, None))
        return False

    def _mixed(self, func: Any, tensor: Tensor, home: str | None) -> str:
        owner = owner_of(tensor, self._layers)
        if home is None:
            where = "lives on none, in the memory of the host: " + (
                owner
                or "made outside of the step, or in it without device=x.device. Copy it over, tensor.to(x.device), or "
                "make it a buffer of its layer, self.register_buffer(name, tensor)"
            )
        else:
            where = (
                f"lives on {home}{f': {owner}' if owner else ''}. Copy it over, tensor.to(x.device), or pass it from "
                "layer to layer with what they return"
            )
        return (
            f"expected all tensors on one device: {func} runs on {self.ledger.device} and was given a tensor of shape "
            f"{tuple(tensor.shape)} that {where}"
        )


class ExplicitMoves(TorchFunctionMode):
    """Tracks what the user's code copies to a device or to the host, or creates there: on the CPU these are no copies.

    Args:
        device: of the worker.
    """

    def __init__(self, device: StrictDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cpu and args[0].device.type == "cpu":
            return _Moved.apply(args[0], self._device, True)
        constructs = func in _device_constructors()
        if constructs and kwargs.get("device") is None and not any(map(self._device.is_home, _flat(args))):
            with self._device.unchecked():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        names_device = "device" in kwargs or any(
            isinstance(argument, torch.device | str | int | Tensor) for argument in args[1:2]
        )
        if (
            func is Tensor.type_as
            or (func is Tensor.to and names_device)
            or (constructs and kwargs.get("device") is not None)
        ) and (
            isinstance(result, Tensor) and result.device.type == "cpu" and not self._device.is_home(result)
        ):
            return _Moved.apply(result, self._device, False)
        return result


class _Moved(torch.autograd.Function):
    """A copy on the device or on the host; its gradient is copied the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: StrictDevice, to_host: bool) -> Tensor:
        ctx.device, ctx.to_host = device, to_host
        return device.copied(tensor, to_host)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.device.copied(gradients[0], not ctx.to_host), None, None


def _flat(nest: Iterable[Any] | Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, including those in lists."""
    for item in nest if isinstance(nest, list | tuple) else (nest,):
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from (tensor for tensor in item if isinstance(tensor, Tensor))


@cache
def _is_view(func: Any) -> bool:
    return any(
        returned.alias_info is not None and not returned.alias_info.is_write
        for returned in func._schema.returns
    )


@cache
def _writes_first(func: Any) -> bool:
    written = func._schema.arguments[0].alias_info
    return written is not None and written.is_write
