"""Finds out whether layers share Python values, such as a dict that one of them fills and another one reads."""

from __future__ import annotations

from collections.abc import Sequence
from types import CellType, ModuleType

from torch import nn

from .recorded.python_state.contents import Snapshot
from .recorded.python_state.places import Place
from .recorded.python_state.surroundings import Surroundings


def share_values(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> bool:
    """Return True if two layers of a model hold the same list, dict, object, generator or plain tensor.

    Parameters, buffers and modules do not count. What the code of the layers finds in globals does.
    """
    surroundings = Surroundings(model)
    holders: dict[int, nn.Module] = {}
    for layer in dict.fromkeys(layer for _, layer in layers):
        for place in Snapshot(layer, surroundings.places((), layer)).places:
            if _is_value(place) and holders.setdefault(id(place.owner), layer) is not layer:
                return True
    return False


def _is_value(place: Place) -> bool:
    """Return False for the attributes of a module or class, the globals of a file and the variables of a closure."""
    if place.is_module or isinstance(place.owner, type | ModuleType | CellType):
        return False
    return not (isinstance(place.owner, dict) and "__builtins__" in place.owner)
