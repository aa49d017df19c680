"""Finds layers that are equal, so that one of them is timed and stands for all.

Layers are equal if they have the same classes and settings throughout, parameters and buffers of the same shapes, the
same hooks, and if they ran the same operations on inputs of the same shapes. A layer of which something cannot be
compared is equal to none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import state_of
from ..capture.recorded.python_state.value_key import Same
from ..capture.recorded.replay.layers import RecordedLayer
from ..capture.recorded.replay.pattern import replay_pattern
from .layer_pass import Layers
from .operations import form_of

_OWN_NUMBER = frozenset(
    f"{what}{number}"
    for what in ("", "layer_", "block_")
    for number in ("idx", "index", "id", "number", "num", "i")
)
"""Names of settings that say which layer of the model a layer is. What it does with that is in its operations."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)
_TABLES = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
_DEPTH = 5  # of nests in settings


class EqualLayers:
    """Compares the layers of a chain with each other.

    Args:
        layers: names and modules, in execution order.
        value: the input of the first layer.
    """

    def __init__(self, layers: Layers, value: Any) -> None:
        holders: dict[Tensor, set[int]] = {}
        for index, (_, layer) in enumerate(layers):
            for tensor in state_of(layer):
                holders.setdefault(tensor, set()).add(index)
        self._keys: list[Hashable] = []
        for index, (_, layer) in enumerate(layers):
            structure = _structure(layer, index, holders)
            self._keys.append(None if structure is None else (structure, replay_pattern(layer, value)))
        self._first: dict[Hashable, int] = {}

    def first_like(self, index: int, run: Hashable) -> int:
        """Return the index of the first layer, of those asked for so far, that a layer is equal to; maybe its own.

        Args:
            index: of the layer.
            run: a key of what it did: see :class:`Memory`.
        """
        if self._keys[index] is None:
            return index
        return self._first.setdefault((self._keys[index], run), index)


def sharing_notes(layers: Layers, like: Sequence[int]) -> Iterator[str]:
    """Say for each layer that was timed for others how many these are."""
    counts = Counter(like[: len(layers)])
    for first, count in counts.items():
        if count > 1:
            yield (
                f"{layers[first][0]} was timed for {count} layers that are equal, itself included; "
                "share=False (--no-share) times each"
            )


class _CannotBeCompared(Exception):
    """A setting has no value to compare, or may make a difference that is not seen."""


def _structure(layer: nn.Module, index: int, holders: dict[Tensor, set[int]]) -> Hashable:
    """Return a key of the modules in a layer with their settings, parameters and buffers; None if there is none."""
    own = {id(thing): number for number, thing in enumerate([*layer.modules(), *state_of(layer)])}

    def tensor_key(tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        shared = holders[tensor]
        # The last layer that holds a parameter is the first whose backward reaches it; later ones add to its gradient.
        tie = (Same(tensor), index < max(shared)) if len(shared) > 1 else None
        return own[id(tensor)], form_of(tensor), tie

    def module_key(module: nn.Module) -> Hashable:
        tensors = tuple(
            (name, tensor_key(tensor))
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
        )
        if isinstance(module, RecordedLayer):
            # Its class, its attributes and the names of its modules are its own.
            return tensors, tuple(own[id(child)] for child in module.children())
        if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
            raise _CannotBeCompared
        children = tuple((name, child and own[id(child)]) for name, child in module._modules.items())
        settings = tuple(_settings(module, own))
        return Same(type(module)), tensors, children, settings, _hooks(module)

    try:
        return tuple(module_key(module) for module in layer.modules())
    except _CannotBeCompared:
        return None


def _settings(module: nn.Module, own: dict[int, int]) -> Iterator[Hashable]:
    for name, value in vars(module).items():
        if name in _TABLES or "_hooks" in name:
            continue
        if not (name in _OWN_NUMBER and type(value) is int):
            yield name, _setting(value, own)


def _setting(value: Any, own: dict[int, int], depth: int = _DEPTH) -> Hashable:
    """Return a key of a setting: plain values, nests and partial functions by value, other objects by identity."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if id(value) in own:
        return type(value), own[id(value)]
    if isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad) or not depth:
        raise _CannotBeCompared  # a reference to a part of another layer, whose gradients it would add to
    if type(value) is dict:
        return dict, tuple(
            (_setting(key, own, depth - 1), _setting(item, own, depth - 1)) for key, item in value.items()
        )
    if type(value) in (list, tuple):
        return type(value), tuple(_setting(item, own, depth - 1) for item in value)
    if type(value) is partial:
        return partial, _setting((value.func, value.args, value.keywords), own, depth - 1)
    if type(value) in (set, frozenset):
        return type(value), frozenset(_setting(item, own, depth - 1) for item in value)
    return Same(value)


def _hooks(module: nn.Module) -> Hashable:
    """Return a key of the hooks of forward and backward, by identity, and in which order they were added."""
    tables = [
        (name, table)
        for name, table in vars(module).items()
        if "_hooks" in name and name.startswith(("_forward", "_backward")) and isinstance(table, dict)
    ]
    handles = sorted({handle for _, table in tables for handle in table})
    return tuple(
        (name, tuple((handles.index(handle), Same(hook)) for handle, hook in table.items()))
        for name, table in tables
    )
