"""Counts the memory of each layer of a chain: what is kept for backward, and what is needed for a while."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..autograd import graph_cut
from ..autograd.sparse import dense_parts
from ..data.arguments import call
from .costs import SavedTensor
from .timing import Layers, Loss, blaming, fresh, named_calls


@dataclass
class Memory:
    """Bytes of each layer, the loss counted with the last one, and the pieces that are kept for backward."""

    saved_bytes: list[int]
    input_bytes: list[int]
    output_bytes: list[int]
    workspace_bytes: list[int]
    saved: tuple[SavedTensor, ...]


def count_memory(model: nn.Module, layers: Layers, loss: Loss, sample: Any) -> Memory:
    """One forward and backward of the chain with every tensor counted.

    Storage that several tensors share counts once, that of parameters and buffers not at all. What a kernel
    allocates inside itself is not seen.
    """
    counter = _Counter(len(layers), (*model.parameters(), *model.buffers()))
    names, modules = named_calls(layers, loss)
    steps = []
    message = fresh(sample)
    with torch.enable_grad(), counter:
        for index, module in enumerate(modules):
            counter.enter(min(index, len(layers) - 1), message)
            with saved_tensors_hooks(counter.pack, _Kept.unpack), blaming(names[index], "forward"):
                output = call(module, graph_cut.alias(message))
            given, message = message, None
            message, roots = graph_cut.cut(output)
            del output
            counter.leave_forward(message if index < len(layers) else None)
            steps.append((given, roots))
            del given
        gradients: graph_cut.Gradients = [torch.ones_like(leaf) for leaf in graph_cut.leaves(message)]
        del message
        for index in reversed(range(len(steps))):
            given, roots = steps.pop()
            counter.enter(min(index, len(layers) - 1), None)
            with blaming(names[index], "backward"):
                graph_cut.backward(roots, gradients)
            gradients = [leaf.grad for leaf in graph_cut.leaves(given)]
            del given, roots
            counter.leave_backward()
    return counter.memory()


@dataclass
class _Piece:
    """One storage: the layers that save it, and those that have it as their input."""

    bytes: int
    layers: set[int] = field(default_factory=set)
    input_of: set[int] = field(default_factory=set)


class _Token:
    """Lives as an attribute of a storage for as long as the storage does, and counts its bytes as alive."""

    __slots__ = ("counter", "layer", "size")

    def __init__(self, counter: _Counter, size: int) -> None:
        self.counter, self.size, self.layer = counter, size, counter.layer
        counter.alive += size
        counter.peak = max(counter.peak, counter.alive)

    def __del__(self) -> None:
        self.counter.alive -= self.size


class _Kept:
    """What autograd holds in place of a saved tensor, for as long as it would hold that."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> Tensor:
        return self.tensor


class _Counter(TorchDispatchMode):
    """Sees each tensor that comes to be, and when its memory goes."""

    def __init__(self, layers: int, state: Iterable[Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.layer = -1
        self._start = 0
        self._state = storages_of(state)
        self._pieces: dict[int, _Piece] = {}
        self._packed: list[weakref.ref[_Kept]] = []
        self._inputs = [0] * layers
        self._outputs = [0] * layers
        self._peaks = [0] * layers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._track(tensor)
        return result

    def enter(self, layer: int, message: Any) -> None:
        """A layer begins."""
        if layer != self.layer and message is not None:
            self._inputs[layer] = sum(tensor.nbytes for tensor in _tensors(message))
            for tensor in _tensors(message):
                self._piece(tensor).input_of.add(layer)
        self.layer = layer
        self._start = self.peak = self.alive

    def leave_forward(self, message: Any) -> None:
        """A layer's forward is done; what it newly saved is its stash, the rest of its peak was for a while."""
        self._outputs[self.layer] += sum(tensor.nbytes for tensor in _tensors(message))
        for kept in filter(None, (reference() for reference in self._packed)):
            for part in dense_parts(kept.tensor):
                if part.untyped_storage()._cdata not in self._state:
                    self._piece(part).layers.add(self.layer)
        self._packed.clear()
        kept = sum(
            piece.bytes for piece in self._pieces.values() if min(piece.layers, default=-1) == self.layer
        )
        self._note_peak(self.peak - self._start - kept)

    def leave_backward(self) -> None:
        """A layer's backward is done."""
        self._note_peak(self.peak - self._start)

    def pack(self, tensor: Tensor) -> _Kept:
        """Autograd keeps ``tensor`` for the backward of the layer that runs, unless its graph is dropped before."""
        kept = _Kept(tensor.detach())
        self._packed.append(weakref.ref(kept))
        return kept

    def memory(self) -> Memory:
        """What was counted."""
        saved = [0] * len(self._inputs)
        for piece in self._pieces.values():
            for layer in piece.layers:
                saved[layer] += piece.bytes
        pieces = tuple(
            SavedTensor(
                bytes=piece.bytes, layers=tuple(sorted(piece.layers)), input_of=tuple(sorted(piece.input_of))
            )
            for piece in self._pieces.values()
        )
        return Memory(saved, self._inputs, self._outputs, self._peaks, pieces)

    def _note_peak(self, size: int) -> None:
        self._peaks[self.layer] = max(self._peaks[self.layer], size)

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._state and not hasattr(storage, "_pipepart_token"):
            storage._pipepart_token = _Token(self, storage.nbytes())  # type: ignore[attr-defined]

    def _piece(self, tensor: Tensor) -> _Piece:
        storage = tensor.untyped_storage()
        # Steps keep every message and graph alive until their backward, so that no address is used twice here.
        return self._pieces.setdefault(storage._cdata, _Piece(storage.nbytes()))


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """The memory that tensors are in, to tell whether others are there, too."""
    return {part.untyped_storage()._cdata for tensor in tensors for part in dense_parts(tensor)}


def _tensors(value: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(value)
    return [part for leaf in leaves if isinstance(leaf, Tensor) for part in dense_parts(leaf)]
