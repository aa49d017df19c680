"""What each layer puts out for each micro-batch and what gradient comes back to it, seen through hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .numbers import Tensors, copied

_Key = tuple[int, int]  # micro-batch, and which tensor of the output


class Watch:
    """The outputs and their gradients within a ``with`` block, of layers that stand in one place of the model.

    Args:
        layers: of the model, with their names.
        calls: for each layer the micro-batches of its forwards, in their order. Of one that runs a micro-batch
            twice, the second forward counts; of one without any nothing is seen.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], calls: Sequence[Sequence[int]]) -> None:
        self._layers = layers
        self._calls = calls
        self._counts = [0] * len(layers)
        self._outputs: list[dict[_Key, Tensor | None]] = [{} for _ in layers]
        self._gradients: list[dict[_Key, Tensor | None]] = [{} for _ in layers]
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        places = Counter(id(layer) for _, layer in self._layers)
        for place, (_, layer) in enumerate(self._layers):
            if places[id(layer)] == 1:
                self._hooks.callback(layer.register_forward_hook(partial(self._see, place)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def outputs(self, place: int) -> Tensors | None:
        """By micro-batch and tensor; None of a layer that did not run as often as was expected."""
        return self._outputs[place] if self._is_whole(place) else None

    def gradients(self, place: int) -> Tensors | None:
        """Of the same tensors, those that got one."""
        return self._gradients[place] if self._is_whole(place) else None

    def _is_whole(self, place: int) -> bool:
        return self._counts[place] == len(self._calls[place]) > 0

    def _see(self, place: int, layer: nn.Module, given: Any, output: Any) -> None:
        count = self._counts[place]
        self._counts[place] = count + 1
        if count >= len(self._calls[place]):
            return
        micro_batch = self._calls[place][count]
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        for index, tensor in enumerate(tensors):
            key = micro_batch, index
            self._outputs[place][key] = copied(tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._see_gradient, place, key))

    def _see_gradient(self, place: int, key: _Key, gradient: Tensor) -> None:
        self._gradients[place][key] = copied(gradient)
