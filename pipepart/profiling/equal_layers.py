"""Finds layers that are equal, so that one of them is timed for all.

Two layers are equal if they have

- modules of the same classes, with equal settings and no hooks,
- parameters and buffers of the same shapes, strides and dtypes,
- inputs, outputs and arriving gradients of the same shapes, and
- the same operations of torch, forward and backward, with the same arguments.

Settings are compared by value if they are plain (or a list or dict of plain values), other objects by identity. So a
layer that holds a closure, a tensor or an object of its own is equal to no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from ..capture import state_of
from ..capture.recorded.python_state.value_key import Same, value_key
from ..capture.recorded.replay.layers import RecordedLayer
from .layer_pass import Layers
from .operations import form_of

# Settings that number the layers of a model. Where a layer uses its number, its operations show it.
_LAYER_NUMBERS = frozenset(
    f"{prefix}{word}"
    for prefix in ("", "layer_", "block_")
    for word in ("idx", "index", "id", "number", "num", "i")
)
_NO_SETTINGS = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))


class EqualLayers:
    """Compares the layers of a chain with each other.

    Args:
        layers: names and modules, in execution order.
    """

    def __init__(self, layers: Layers) -> None:
        holders: dict[Tensor, list[int]] = {}
        for index, (_, layer) in enumerate(layers):
            for tensor in state_of(layer):
                holders.setdefault(tensor, []).append(index)
        self._structures = [_structure(layer, index, holders) for index, (_, layer) in enumerate(layers)]
        self._first: dict[Hashable, int] = {}

    def first_like(self, index: int, run: Hashable) -> int:
        """Return the index of the first layer, of those asked for so far, that a layer is equal to; maybe its own.

        Args:
            index: of the layer.
            run: a key of its input, its output and its operations: see :class:`Memory`.
        """
        return self._first.setdefault((self._structures[index], run), index)


def sharing_notes(layers: Layers, like: Sequence[int]) -> Iterator[str]:
    """Say for each layer that was timed for others how many these are."""
    counts = Counter(like[: len(layers)])
    for first, count in counts.items():
        if count > 1:
            yield (
                f"{layers[first][0]} was timed for {count} layers that are equal, itself included; "
                "share=False (--no-share) times each"
            )


def _structure(layer: nn.Module, index: int, holders: Mapping[Tensor, Sequence[int]]) -> Hashable:
    """Return a key of the modules in a layer, of their settings, and of the layer's parameters and buffers."""
    numbers = {id(part): number for number, part in enumerate([*layer.modules(), *state_of(layer)])}

    def tensor_key(tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        # The backward reaches the last holder of a tied parameter first. The others add to its gradient.
        tied = len(holders[tensor]) > 1
        tie = (Same(tensor), index == holders[tensor][-1]) if tied else None
        return numbers[id(tensor)], form_of(tensor), tie

    def module_key(module: nn.Module) -> Hashable:
        tensors = tuple(
            (name, tensor_key(tensor))
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
        )
        if isinstance(module, RecordedLayer):  # its class, and the names in it, differ from layer to layer
            return tensors, tuple(numbers[id(child)] for child in module.children())
        children = tuple((name, child and numbers[id(child)]) for name, child in module._modules.items())
        return Same(type(module)), tensors, children, _settings(module)

    return tuple(map(module_key, layer.modules()))


def _settings(module: nn.Module) -> Hashable:
    """Return a key of the attributes of a module, and of its hooks, which are stored under unique numbers."""
    return tuple(
        (name, value_key(value, depth=1))
        for name, value in vars(module).items()
        if name not in _NO_SETTINGS and not (name in _LAYER_NUMBERS and type(value) is int)
    )
