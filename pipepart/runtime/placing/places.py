"""Lists the tensors of a model that the stages of this process use, and the device of each."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...capture import state_of
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
        yield from state_of(layer)
