"""The first layer whose numbers differ between two runs of the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torch import nn

from .numbers import Numbers, different, largest_error
from .watch import Watch

Layers = Sequence[tuple[str, nn.Module]]


class Part(Enum):
    """Where in a step two runs part."""

    FORWARD = "its output"
    BUFFERS = "its buffers"
    LOSS = "the loss"
    BACKWARD = "the gradient of its input"
    GRADIENTS = "the gradient of its parameters"
    PARAMETERS = "its parameters"


@dataclass(frozen=True)
class Culprit:
    """A layer by name and class, empty for the loss; the part in which it differs; the tensors by name."""

    layer: str
    kind: str
    part: Part
    tensors: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """What differs, in words."""
        if not self.layer and self.part is Part.BACKWARD:
            return "the gradient of the model's output"
        if not self.tensors:
            return self.part.value
        named = ", ".join(self.tensors)
        return f"the gradient of {named}" if self.part is Part.GRADIENTS else named


Run = tuple[Numbers, Watch]  # the numbers of a step, and what was seen of its layers


def find_culprit(layers: Layers, ours: Run, theirs: Run, allowed: float) -> Culprit | None:
    """The layer after which two runs differ by more than ``allowed``, what comes before it being alike.

    Forward first, in order of the layers; then the loss; then backward, from the last layer to the first.

    Args:
        layers: of the model, with their names.
        ours, theirs: the runs.
        allowed: relative error; 0 finds the first different bit.
    """
    both = _Comparison(layers, ours, theirs, allowed)
    return next((found for ways in (both.forward(), both.backward(), both.update()) for found in ways), None)


class _Comparison:
    """Two runs of the same step, layer by layer."""

    def __init__(self, layers: Layers, ours: Run, theirs: Run, allowed: float) -> None:
        self._layers = layers
        self._watches = ours[1], theirs[1]
        self._allowed = allowed
        self._apart = {
            kind: different(ours[0].parts[kind], tensors, allowed)
            for kind, tensors in theirs[0].parts.items()
        }

    def forward(self) -> Iterator[Culprit]:
        """Outputs, buffers, and the loss."""
        for place in range(len(self._layers)):
            if self._see_other("outputs", place):
                yield self._culprit(place, Part.FORWARD)
            yield from self._own("buffers", place, Part.BUFFERS)
        if self._apart["losses"]:
            yield self._culprit(len(self._layers), Part.LOSS)

    def backward(self) -> Iterator[Culprit]:
        """The gradient of a layer's output comes from the layer behind it."""
        for place in reversed(range(len(self._layers))):
            if self._see_other("gradients", place):
                yield self._culprit(place + 1, Part.BACKWARD)
            yield from self._own("gradients", place, Part.GRADIENTS)

    def update(self) -> Iterator[Culprit]:
        """Parameters after the optimizer."""
        for place in range(len(self._layers)):
            yield from self._own("parameters", place, Part.PARAMETERS)

    def _see_other(self, what: Literal["outputs", "gradients"], place: int) -> bool:
        ours, theirs = (getattr(watch, what)(place) for watch in self._watches)
        return ours is not None and theirs is not None and largest_error(ours, theirs) > self._allowed

    def _own(self, kind: str, place: int, part: Part) -> Iterator[Culprit]:
        names = tuple(name for name in self._apart[kind] if self._owner(name) == place)
        if names:
            yield self._culprit(place, part, names)

    def _owner(self, name: str) -> int | None:
        """The place of the layer that a parameter or buffer of that name belongs to."""
        places = enumerate(self._layers)
        return next((place for place, (layer, _) in places if name.startswith(f"{layer}.")), None)

    def _culprit(self, place: int, part: Part, tensors: tuple[str, ...] = ()) -> Culprit:
        if place == len(self._layers):
            return Culprit("", "", part)
        name, module = self._layers[place]
        return Culprit(name, type(module).__name__, part, tensors)
