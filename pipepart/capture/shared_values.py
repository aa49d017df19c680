"""Checks whether layers share Python values, such as a dict that one layer fills and another layer reads."""

from __future__ import annotations

from collections.abc import Sequence
from types import CellType, ModuleType

from torch import nn

from .recorded.python_state.access import UNCHANGED
from .recorded.python_state.snapshot import Snapshot
from .recorded.python_state.surroundings import Surroundings
from .recorded.python_state.values import Holder


def share_values(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> bool:
    """Return True if any two layers of a model hold the same list, dict, object, generator or plain tensor.

    Parameters, buffers, modules, functions and what nothing changes do not count. What the code of the layers finds in
    globals does.
    """
    surroundings = Surroundings(model)
    # The holder keeps its owner, so that no other object gets the id.
    holders: dict[int, tuple[nn.Module, Holder]] = {}
    for layer in dict.fromkeys(layer for _, layer in layers):
        snapshot = Snapshot(layer, surroundings.holders((), layer))
        for holder in (holder for holder, _ in snapshot.found if _is_value(holder)):
            if holders.setdefault(id(holder.owner), (layer, holder))[0] is not layer:
                return True
    return False


def _is_value(holder: Holder) -> bool:
    """Return False for what nothing changes, attributes of modules and classes, globals, functions and closures."""
    if holder.is_module or isinstance(holder.owner, (type, ModuleType, CellType, *UNCHANGED)):
        return False
    return not (isinstance(holder.owner, dict) and "__builtins__" in holder.owner)
