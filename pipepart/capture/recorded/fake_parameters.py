"""Runs a model with fake parameters (``FakeTensorMode``), to record it where its parameters have no values.

::

    parameters, buffers         fake tensors: a shape, a dtype and a device, and no memory
    arguments, constants        real tensors
    operations on real ones     run, so that code may read values of the arguments: ``if mask.all(): ...``
    operations on any fake one  give fake tensors, whose values cannot be read

So a process that has only some layers finds the recording that the whole model would give, and so does one that has
the model on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from ...autograd.dispatch_mode import DispatchMode
from ...autograd.own_copy import tensors
from ...dtensors import is_dtensor
from ..grouped_product import grouped_product
from ..restore import bindings_restored, exchanged
from ..sequential import state_of

_GROUPED = torch.ops.aten._grouped_mm.default
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


class Fakes:
    """Fake tensors on one device that stand for the tensors of a model.

    Args:
        device: that the forward finds them on.
    """

    def __init__(self, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._made: dict[Tensor, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that stands for a tensor; equal calls return the same object."""
        if tensor not in self._made:
            with self._mode:
                if is_dtensor(tensor):
                    layout = tensor.shape, tensor.stride()
                    fake = torch.empty_strided(*layout, dtype=tensor.dtype, device=self._device)
                else:
                    fake = torch.empty_like(tensor.detach(), device=self._device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake)
            self._made[tensor] = fake.requires_grad_(tensor.requires_grad)
        return self._made[tensor]

    def if_on_meta(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor for a meta tensor; any other tensor is returned unchanged."""
        return self.of(tensor) if tensor.is_meta else tensor

    def in_use(self) -> DispatchMode:
        """Return a context manager in which operations accept fake and real tensors together."""
        return _Mixing(self._mode)

    def originals(self) -> dict[Tensor, Tensor]:
        """Map each fake tensor to the tensor that it stands for."""
        return {fake: tensor for tensor, fake in self._made.items()}


@contextmanager
def on_fakes(model: nn.Module) -> Iterator[Fakes]:
    """Replace a model's parameters and buffers by fake tensors within the block.

    Attributes of modules are replaced as well if they are on the meta device.
    """
    real = (tensor.device for tensor in state_of(model) if not tensor.is_meta)
    fakes = Fakes(next(real, torch.device("cpu")))
    with exchanged(model, {tensor: fakes.of(tensor) for tensor in state_of(model)}), bindings_restored(model):
        for module in model.modules():
            for name, value in vars(module).items():
                leaves = () if name in _TABLES else pytree.tree_leaves(value)
                if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                    vars(module)[name] = pytree.tree_map_only(Tensor, fakes.if_on_meta, value)
        yield fakes


def asks_for_values(error: BaseException) -> bool:
    """Return True if the error comes from an operation that needs the values of fake tensors."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


class _Mixing(DispatchMode):
    """Runs an operation on fake tensors if any of its arguments is one, or has lost its values.

    A real tensor into which a fake one is written has lost them: its memory keeps what was there before.

    Args:
        mode: makes fake tensors of real ones.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._lost: dict[int, torch.UntypedStorage] = {}  # kept, so that no other gets its address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not any(map(self._has_no_values, tensors((args, named)))):
            return func(*args, **named)
        for tensor in _written(func, args, named):
            if not isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                self._lost[storage._cdata] = storage
        originals: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            mixed = self._mode.from_tensor(tensor)
            originals[id(mixed)] = tensor
            return mixed

        args, named = pytree.tree_map_only(Tensor, fake, (args, named))
        with self._mode:
            result = (grouped_product if func is _GROUPED else func)(*args, **named)
        return pytree.tree_map_only(Tensor, lambda t: originals.get(id(t), t), result)

    def _has_no_values(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return True
        return (
            bool(self._lost)
            and tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata in self._lost
        )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes, by its schema."""
    places = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return list(tensors(places))
