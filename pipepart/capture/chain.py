"""Chain: the layers of a model in order, where the output of each layer is the input of the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from .recorded.replay.recording import Group


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

    def modules_of(self, layers: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
        """Return the user's modules that some of the layers consist of, by name."""
        groups = self.groups
        modules: dict[str, nn.Module] = {}
        for name, layer in layers:
            if name not in groups:
                modules[name] = layer
            for path in groups[name].modules if name in groups else ():
                modules[path or name] = self.model.get_submodule(path)
        return modules


class Whole(Chain):
    """A model as a single layer, named after its class. Nothing is recorded."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, [(type(model).__name__, model)])

    @property
    def places(self) -> list[tuple[str, nn.Module]]:
        """The children of the model."""
        return list(self.model.named_children())

    @property
    def groups(self) -> Mapping[str, Group]:
        """The model, whose path is empty."""
        return {self.layers[0][0]: WHOLE}


WHOLE = Group(("",), ())
"""What the only layer of a :class:`Whole` calls."""
