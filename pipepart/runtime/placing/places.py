"""Which tensors of a model the stages of this process use, and on which device each belongs."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..state.shadow import Layers


class Places(NamedTuple):
    """Where the tensors of a model belong.

    Attributes:
        homes: the device of each tensor that a stage of this process uses: that of the first such stage.
        foreign: the tensors that only stages of other processes use, which have no memory here.
    """

    homes: dict[Tensor, torch.device]
    foreign: frozenset[Tensor]

    @classmethod
    def of(cls, groups: Sequence[Layers], devices: Sequence[torch.device], local: Container[int]) -> Self:
        """Find the places of the tensors of all stages.

        Args:
            groups: the layers of each stage.
            devices: of each stage.
            local: the numbers of the stages that this process runs.
        """
        homes: dict[Tensor, torch.device] = {}
        others: set[Tensor] = set()
        for number, (layers, device) in enumerate(zip(groups, devices, strict=True)):
            for tensor in _tensors_of(layers):
                if number in local:
                    homes.setdefault(tensor, device)
                else:
                    others.add(tensor)
        return cls(homes, frozenset(others - homes.keys()))


def _tensors_of(layers: Layers) -> Iterator[Tensor]:
    for _, layer in layers:
        for part in layer.modules():
            yield from held_by(part)


def held_by(part: nn.Module) -> Iterator[Tensor]:
    """Return the parameters and buffers of a module without its children, and its attributes on the meta device."""
    for tensor in (*part._parameters.values(), *part._buffers.values()):
        if tensor is not None:
            yield tensor
    for _, tensor in attributes_of(part):
        yield tensor


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on the meta device among the attributes of a module, also in lists, tuples and dicts."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.is_meta:
                    yield name, leaf
