"""Checks whether layers share Python values, such as a dict that one layer fills and another layer reads."""

from __future__ import annotations

from collections.abc import Sequence
from types import CellType, ModuleType

from torch import nn

from .recorded.python_state.access import UNCHANGED
from .recorded.python_state.code import is_of_torch
from .recorded.python_state.surroundings import Surroundings
from .recorded.python_state.values import Holder


def share_values(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> bool:
    """Return True if any two layers of a model hold the same list, dict, object, generator or plain tensor.

    Parameters, buffers, functions and what nothing changes do not count. Modules count if their code sets attributes,
    or if another layer refers to them without holding them as its part. What the code of the layers finds in globals
    counts.
    """
    surroundings = Surroundings(model)
    parts = set(model.modules())
    snapshots = {layer: surroundings.snapshot_of(layer) for _, layer in layers}
    homes: dict[int, int] = {}  # the snapshots keep the owners, so that no other object gets the id
    for place, (_, layer) in enumerate(layers):
        for holder, _ in snapshots[layer].found:
            owner = holder.owner
            if isinstance(owner, nn.Module) and not holder.is_module and owner in parts:
                return True
            if _is_value(holder, surroundings) and homes.setdefault(id(owner), place) != place:
                return True
    return False


def _is_value(holder: Holder, surroundings: Surroundings) -> bool:
    """Return False for what nothing changes, attributes of classes, globals, functions and closures."""
    owner = holder.owner
    if holder.is_module:
        return not is_of_torch(type(owner)) and surroundings.code_of(owner).stores
    if isinstance(owner, (type, ModuleType, CellType, *UNCHANGED)):
        return False
    return not (isinstance(owner, dict) and "__builtins__" in owner)
