"""Finds the layers of a module and describes them as a graph: names, shapes and bytes."""

from typing import TYPE_CHECKING, Any

from .layer_info import LayerInfo, SharedTensor, TensorSpec
from .restore import bindings_restored, restored, shadow_parameters
from .sequential import capture, describe, flatten, state_of, tensor_specs

if TYPE_CHECKING:
    from .graph import LayerGraph

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


def __getattr__(name: str) -> Any:
    if name != "LayerGraph":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .graph import LayerGraph  # at its first use: networkx takes half a second to import

    return LayerGraph
