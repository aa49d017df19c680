"""Runs a model without values: on fake tensors, which have a shape, a dtype and a device, and no memory.

Under several processes each has only the layers of its own stages, and the others are on the meta device. All of them
are recorded with fake tensors in place of their own, so that every process finds the same recording.
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

from ..restore import bindings_restored, exchanged
from ..sequential import state_of

_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


class Fakes:
    """Fake tensors, all on one device, and what they stand for.

    Args:
        device: that the forward finds them on.

    Attributes:
        mode: under which a forward runs on them.
    """

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._made: dict[Tensor, Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Return a new fake tensor like another, which needs no gradient."""
        with self.mode:
            return torch.empty_like(tensor.detach(), device=self._device)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that stands for a tensor of the model, always the same one."""
        if tensor not in self._made:
            fake = self.like(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake)
            self._made[tensor] = fake.requires_grad_(tensor.requires_grad)
        return self._made[tensor]

    def originals(self) -> dict[Tensor, Tensor]:
        """Return what each fake tensor stands for."""
        return {fake: tensor for tensor, fake in self._made.items()}


@contextmanager
def on_fakes(model: nn.Module) -> Iterator[Fakes]:
    """Have a model hold fake tensors within the block, in place of its parameters and buffers.

    Attributes of modules on the meta device are replaced as well. Other tensors stay what they are: a forward may read
    their values.
    """
    real = (tensor.device for tensor in state_of(model) if not tensor.is_meta)
    fakes = Fakes(next(real, torch.device("cpu")))
    with exchanged(model, {tensor: fakes.of(tensor) for tensor in state_of(model)}), bindings_restored(model):
        for module in model.modules():
            for name, value in vars(module).items():
                if name not in _TABLES and any(map(_is_on_meta, pytree.tree_leaves(value))):
                    vars(module)[name] = pytree.tree_map_only(_is_on_meta, fakes.of, value)
        yield fakes


def asks_for_values(error: BaseException) -> bool:
    """Return True for an error that an operation raises because its result depends on values of fake tensors."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def has_values(tensor: Tensor) -> bool:
    """Return True unless a tensor is fake or on the meta device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
