"""Finds the layers of a module and describes them as a graph: names, shapes and bytes."""

from .graph import LayerGraph, LayerInfo, SharedTensor, TensorSpec
from .restore import bindings_restored, restored, shadow_parameters
from .sequential import capture, describe, flatten, state_of, tensor_specs

__all__ = [
    "LayerGraph",
    "LayerInfo",
    "SharedTensor",
    "TensorSpec",
    "bindings_restored",
    "capture",
    "describe",
    "flatten",
    "restored",
    "shadow_parameters",
    "state_of",
    "tensor_specs",
]
