"""Finds the live values of a recorded model that skip layers, with their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..capture import Live, TensorSpec, tensor_specs
from .costs import SkippingValue


def skipping_values(value: Any, outputs: Sequence[tuple[TensorSpec, ...]]) -> tuple[SkippingValue, ...]:
    """Return the live values that layers between their maker and a user do not use.

    Args:
        value: the input of the first layer.
        outputs: specs of the tensors that each layer returns.
    """
    if not isinstance(value, Live):
        return ()
    parts, arguments = value.recording.parts, value.recording.inputs
    behind = [(parts[0].takes, tensor_specs(value))]
    behind += [(part.gives, specs) for part, specs in zip(parts[:-1], outputs, strict=False)]
    sizes = {
        number: spec.bytes for numbers, specs in behind for number, spec in zip(numbers, specs, strict=True)
    }
    return tuple(
        SkippingValue(bytes=sizes[number], is_argument=number in arguments, layers=tuple(layers))
        for number, layers in value.recording.touched.items()
        if any(other > one + 1 for one, other in pairwise(layers))
    )
