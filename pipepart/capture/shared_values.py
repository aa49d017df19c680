"""Checks whether layers share Python values, such as a dict that one layer fills and another layer reads."""

from __future__ import annotations

from collections.abc import Sequence
from types import CellType, ModuleType
from typing import Any

from torch import nn

from .recorded.python_state.access import UNCHANGED
from .recorded.python_state.code import is_of_torch
from .recorded.python_state.surroundings import Surroundings


def share_values(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> bool:
    """Return True if any two layers of a model hold the same list, dict, object, generator or plain tensor.

    Parameters, buffers, functions and what nothing changes do not count. Modules count if their code sets attributes,
    or if another layer refers to them without holding them as its part. What the code of the layers finds in globals
    counts; the globals, classes and closures themselves count if it sets something there.
    """
    surroundings = Surroundings(model)
    parts = set(model.modules())
    snapshots = {layer: surroundings.snapshot_of(layer) for _, layer in layers}
    homes: dict[int, Any] = {}  # the snapshots keep the owners, so that no other object gets the id
    for place, (_, layer) in enumerate(layers):
        for holder, contents in snapshots[layer].found:
            owner, root = holder.owner, holder.root
            # A layer of the user's that is called twice may share it with itself.
            home = place if root is None or not is_of_torch(type(root)) else layer
            if isinstance(owner, nn.Module) and not holder.is_module and owner in parts:
                return True
            if _is_table(owner):
                stored = _stored_by(owner if holder.is_module else layer, owner, surroundings)
                if not (stored if holder.is_module else stored & contents.keys()):
                    continue
                home = place
            elif isinstance(owner, UNCHANGED):
                continue
            if homes.setdefault(id(owner), home) != home:
                return True
    return False


def _is_table(owner: Any) -> bool:
    """Return True for what binds names: modules, classes, the globals of a file, and cells of closures."""
    is_globals = isinstance(owner, dict) and "__builtins__" in owner
    return is_globals or isinstance(owner, (nn.Module, type, ModuleType, CellType))


def _stored_by(module: nn.Module, owner: Any, surroundings: Surroundings) -> set[str]:
    """Return the names in ``owner`` that the code of a module and its parts sets."""
    parts = [part for part in module.modules() if not is_of_torch(type(part))]
    return set[str]().union(*(surroundings.code_of(part).stores(owner) for part in parts))
