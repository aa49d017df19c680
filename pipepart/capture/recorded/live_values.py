"""Lists the live values of a recorded model: tensors that one layer produces and later layers use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..describing import tensor_specs
from ..layer_info import TensorSpec
from .replay.layers import Live


class LiveTensor(NamedTuple):
    """A tensor that one layer produces and later layers use.

    Attributes:
        spec: of one micro-batch.
        layers: indices of the layers that make or use it, increasing. An argument of the model begins at layer 0.
        is_argument: whether no layer makes it.
    """

    spec: TensorSpec
    layers: tuple[int, ...]
    is_argument: bool


def live_tensors(value: Any, outputs: Sequence[tuple[TensorSpec, ...]]) -> list[LiveTensor]:
    """Return the live values of a recorded model; an empty list for other models.

    Args:
        value: the input of the first layer.
        outputs: specs of the tensors that each layer returns.
    """
    if not isinstance(value, Live):
        return []
    parts, arguments = value.recording.parts, value.recording.inputs
    behind = [(parts[0].takes, tensor_specs(value))]
    behind += [(part.gives, specs) for part, specs in zip(parts[:-1], outputs, strict=False)]
    found = {number: spec for numbers, specs in behind for number, spec in zip(numbers, specs, strict=True)}
    return [
        LiveTensor(found[number], tuple(layers), number in arguments)
        for number, layers in value.recording.touched.items()
        if len(layers) > 1
    ]
