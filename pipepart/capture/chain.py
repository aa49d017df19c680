"""A chain: the layers of a model in order, each of which takes what the one before it returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from .recorded.recording import Group


class Chain:
    """The layers of a model.

    Args:
        model: the user's.
        layers: names and modules, in execution order.

    Attributes:
        entrance: the module that takes the arguments of a call, and its name.
        places: the modules that the layers were made of, and their paths in the model.
        groups: for each layer of a recorded model the modules that it calls; empty for an ``nn.Sequential``.
    """

    def __init__(self, model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self.model = model
        self.layers = list(layers)

    @property
    def entrance(self) -> tuple[str, nn.Module]:
        """The first layer."""
        return self.layers[0]

    @property
    def places(self) -> list[tuple[str, nn.Module]]:
        """The layers."""
        return self.layers

    @property
    def groups(self) -> Mapping[str, Group]:
        """None: the layers are the user's."""
        return {}
