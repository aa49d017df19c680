"""Finds the layers of a module and describes them as a graph: names, shapes and bytes."""

from typing import TYPE_CHECKING, Any

from .any_module import chain_of
from .chain import Chain, Whole
from .describing import describe, tensor_specs
from .grouped_product import grouped_product
from .hooks import FORWARD_HOOKS, HOOKS, has_hooks
from .layer_info import LayerInfo, SharedTensor, TensorSpec
from .placeholders import copied
from .recorded.chain import RecordedChain, Verify
from .recorded.refusal import CaptureError, values_refused
from .recorded.replay.comparing import fingerprint
from .recorded.replay.layers import Live, Unfinished, finish, loss_of, reads_values, used_by
from .recorded.replay.outputs import own_loss
from .recorded.replay.recording import Group, Recording
from .restore import restored, shadow_parameters
from .sequential import flatten, holds_meta, state_of

if TYPE_CHECKING:
    from .graph import LayerGraph

__all__ = [
    "FORWARD_HOOKS",
    "HOOKS",
    "CaptureError",
    "Chain",
    "Group",
    "LayerGraph",
    "LayerInfo",
    "Live",
    "RecordedChain",
    "Recording",
    "SharedTensor",
    "TensorSpec",
    "Unfinished",
    "Verify",
    "Whole",
    "chain_of",
    "copied",
    "describe",
    "fingerprint",
    "finish",
    "flatten",
    "grouped_product",
    "has_hooks",
    "holds_meta",
    "loss_of",
    "own_loss",
    "reads_values",
    "restored",
    "shadow_parameters",
    "state_of",
    "tensor_specs",
    "used_by",
    "values_refused",
]


def __getattr__(name: str) -> Any:
    if name != "LayerGraph":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .graph import LayerGraph  # at its first use: networkx takes half a second to import

    return LayerGraph
