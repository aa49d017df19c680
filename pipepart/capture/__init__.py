"""From a module to a graph of layers: names, shapes and bytes, with nothing run for real."""

from .graph import LayerGraph, LayerInfo, SharedTensor, TensorSpec
from .restore import bindings_kept, untouched
from .sequential import capture, describe, flatten, state_of

__all__ = [
    "LayerGraph",
    "LayerInfo",
    "SharedTensor",
    "TensorSpec",
    "bindings_kept",
    "capture",
    "describe",
    "flatten",
    "state_of",
    "untouched",
]
