"""Finds equal layers, so that only the first of them is timed.

Two layers are equal if they have

- modules of the same classes, with equal settings and no hooks,
- parameters and buffers of the same shapes, strides and dtypes,
- inputs, outputs and arriving gradients of the same shapes, and
- the same operations of torch, forward and backward, with the same arguments.

Plain settings, and lists and dicts of plain values, are compared by value; all other objects by identity. So a layer
that holds a closure, a tensor or an object that no other layer holds is equal to no other layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from ..capture import state_of
from ..capture.recorded.python_state.values import Same, value_key
from ..capture.recorded.replay.layers import RecordedLayer
from .layer_pass import Layers
from .operations import form_of

# Attributes that hold the index of a layer. If the layer computes with its index, its operations differ.
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
        """Return the index of the first layer equal to this layer, among the layers of all calls so far.

        Args:
            index: index of the layer, which is also the result if no earlier layer is equal to it.
            run: key of its input, its output and its operations: see :class:`Memory`.
        """
        return self._first.setdefault((self._structures[index], run), index)


def sharing_notes(layers: Layers, like: Sequence[int]) -> Iterator[str]:
    """Yield a note for each layer that was timed for several equal layers, with their number."""
    counts = Counter(like[: len(layers)])
    for first, count in counts.items():
        if count > 1:
            yield (
                f"{layers[first][0]} was timed for {count} layers that are equal, itself included; "
                "share=False (--no-share) times each"
            )


def _structure(layer: nn.Module, index: int, holders: Mapping[Tensor, Sequence[int]]) -> Hashable:
    """Return a key that is equal for layers with equal modules, settings, parameters and buffers."""
    numbers = {id(part): number for number, part in enumerate([*layer.modules(), *state_of(layer)])}

    def tensor_key(tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        # The last layer that holds a tied parameter creates its gradient; the other layers add to it.
        tied = len(holders[tensor]) > 1
        tie = (Same(tensor), index == holders[tensor][-1]) if tied else None
        return numbers[id(tensor)], form_of(tensor), tie

    def module_key(module: nn.Module) -> Hashable:
        tensors = tuple(
            (name, tensor_key(tensor))
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
        )
        if isinstance(
            module, RecordedLayer
        ):  # each recorded layer has a class and attribute names that differ from those of all others
            return tensors, tuple(numbers[id(child)] for child in module.children())
        children = tuple((name, child and numbers[id(child)]) for name, child in module._modules.items())
        return Same(type(module)), tensors, children, _settings(module)

    return tuple(map(module_key, layer.modules()))


def _settings(module: nn.Module) -> Hashable:
    """Return a key of the attributes of a module, with its hooks. Hooks have unique keys, so they make keys differ."""
    return tuple(
        (name, value_key(value))
        for name, value in vars(module).items()
        if name not in _NO_SETTINGS and not (name in _LAYER_NUMBERS and type(value) is int)
    )
