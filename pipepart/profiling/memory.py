"""Counts the memory of each layer of a chain: inputs, outputs, saved tensors, workspace and deferred gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..autograd import graph_cut
from ..autograd.dispatch_mode import DispatchMode
from ..autograd.sparse import dense_parts, dense_tensors
from ..autograd.split_backward import WeightGradients
from ..capture import TensorSpec, tensor_specs, used_by
from .costs import SavedTensor
from .layer_pass import LayerPass, Observer
from .operations import OperationLog, form_of


@dataclass
class LayerBytes:
    """Memory of one layer, with the field names of :class:`LayerCost`."""

    saved_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    output_gradient_bytes: int = 0
    workspace_bytes: int = 0
    forward_workspace_bytes: int = 0
    input_workspace_bytes: int = 0
    weight_workspace_bytes: int = 0
    deferred_bytes: int = 0


@dataclass
class Memory:
    """What was counted in one pass.

    Attributes:
        layers: bytes of each layer, with the loss counted in the last one.
        loss: what the loss alone saves, and its workspace.
        saved: the memory kept for the backward.
        outputs: the specs of each layer's outputs.
        runs: for each layer a key of its input, its output, the gradients that arrive and its operations, equal for
            layers where these are.
    """

    layers: list[LayerBytes]
    loss: LayerBytes
    saved: tuple[SavedTensor, ...]
    outputs: list[tuple[TensorSpec, ...]]
    runs: Sequence[Hashable]


class MemoryCount:
    """Counts the memory of a chain: of all layers together, or part by part, each in its turn.

    Storage that several tensors share counts once; parameters and buffers do not count. Memory that a kernel allocates
    for itself is not seen.

    Args:
        layers: the number of layers in the whole chain, without its loss.
    """

    def __init__(self, layers: int) -> None:
        self._counter = _Counter(layers)

    def add(self, model: nn.Module, part: LayerPass, value: Any, first: int = 0) -> None:
        """Count a part of the chain by one pass with a whole backward and one with a split backward.

        Both add to gradients that are there, as the micro-batches of a step do: the first one has the most memory to
        spare.

        Args:
            model: the module that holds its parameters and buffers.
            part: some layers, or the loss.
            value: their input; behind the first part, the output of the part before, or a copy of it.
            first: the index of its first layer in the chain.
        """
        counter = self._counter
        _make_gradients(model)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        tensors = (*model.parameters(), *model.buffers(), *gradients)
        state = {piece.untyped_storage()._cdata for tensor in tensors for piece in dense_parts(tensor)}
        counter.starts(first, state)
        with counter, saved_tensors_hooks(counter.pack, _Kept.unpack):
            part.run(value, counter)
        split = _SplitCounter(counter.costs_of, state, first)
        with split:
            part.run(value, split, split=True)

    def run_of(self, index: int) -> Hashable:
        """Return a key of what a layer did: see ``Memory.runs``."""
        return self._counter.run_of(index)

    def memory(self) -> Memory:
        """Return what was counted."""
        return self._counter.memory()


@dataclass
class _Piece:
    """One storage: the layers that save it, those that it is an input of, and those of them that use it.

    ``by_loss`` says that the loss saves it and no layer does.
    """

    bytes: int
    number: int = 0
    by_loss: bool = False
    layers: set[int] = field(default_factory=set)
    input_of: set[int] = field(default_factory=set)
    used_by: set[int] = field(default_factory=set)


class _Token:
    """Counts a storage's bytes as allocated as long as the storage has this attribute, until it is freed."""

    __slots__ = ("counter", "size")

    def __init__(self, counter: _Allocations, size: int) -> None:
        self.counter, self.size = counter, size
        counter.allocated += size
        counter.peak = max(counter.peak, counter.allocated)

    def __del__(self) -> None:
        self.counter.allocated -= self.size


class _Kept:
    """Replaces a saved tensor in autograd; it is deleted when autograd would free the tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> Tensor:
        return self.tensor


class _Allocations(DispatchMode, Observer):
    """Counts the bytes that are allocated, and the most at any moment since :meth:`mark`."""

    def __init__(self, state: set[int]) -> None:
        super().__init__()
        self.allocated = self.peak = self.start = 0
        self._state = state  # the addresses of the storages that do not count

    def mark(self) -> None:
        """Begin to look for the peak."""
        self.start = self.peak = self.allocated

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in dense_tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata in self._state or hasattr(storage, "_pipepart_token"):
                continue
            if all(storage._cdata != one.untyped_storage()._cdata for one in dense_tensors((args, kwargs))):
                storage._pipepart_token = _Token(self, storage.nbytes())  # type: ignore[attr-defined]
        return result


class _SplitCounter(_Allocations):
    """Counts the workspace of both parts of a split backward, and what each layer keeps between them."""

    def __init__(self, costs_of: Callable[[int], LayerBytes], state: set[int], first: int) -> None:
        super().__init__(state)
        self._costs_of, self._first = costs_of, first

    def backward_starts(self, index: int, gradients: graph_cut.Gradients) -> None:
        self.mark()

    def input_gradients_done(self, index: int, deferred: WeightGradients | None) -> None:
        assert deferred is not None
        own = self._costs_of(self._first + index)
        own.input_workspace_bytes = self.peak - self.start
        parts = (part for tensor in deferred.tensors() for part in dense_parts(tensor))
        storages = {storage._cdata: storage for storage in (part.untyped_storage() for part in parts)}
        own.deferred_bytes = sum(
            storage.nbytes() for key, storage in storages.items() if key not in self._state
        )
        self.mark()

    def backward_ends(self, index: int) -> None:
        self._costs_of(self._first + index).weight_workspace_bytes = self.peak - self.start


class _Counter(_Allocations):
    """Observes when each storage is allocated and freed, and which storages autograd saves for the backward.

    Storages are known by their addresses. Within a pass none is used twice before the first backward, because the pass
    keeps every input and graph. From one pass to the next, the inputs of the first layer are known by their places in
    the output of the layer before.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(set())
        self.layers = [LayerBytes() for _ in range(layers)]
        self.loss = LayerBytes()
        self._first = 0
        self._in_forward = False
        self._pieces: list[_Piece] = []
        self._known = 0
        self._by_address: dict[int, _Piece] = {}
        self._passed: list[_Piece] = []
        self._packed: list[weakref.ref[_Kept]] = []
        self._specs: list[tuple[TensorSpec, ...]] = [()] * layers
        self._operations = OperationLog()
        self._forms: dict[int, tuple[Hashable, ...]] = {}

    def starts(self, first: int, state: set[int]) -> None:
        """Expect a pass over a part of the chain.

        Args:
            first: the index of the first layer in the part.
            state: the addresses of the storages of its parameters and buffers.
        """
        self._first, self._state = first, state
        self._by_address.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._operations.add(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def costs_of(self, index: int) -> LayerBytes:
        """Return the bytes of a layer; behind the last one, of the loss."""
        return self.layers[index] if index < len(self.layers) else self.loss

    def forward_starts(self, index: int, value: Any) -> None:
        index += self._first
        tensors = dense_tensors(value)
        if index:
            for tensor, piece in zip(tensors, self._passed, strict=True):
                self._by_address.setdefault(tensor.untyped_storage()._cdata, piece)
        for tensor in tensors:
            self._piece(tensor).input_of.add(index)
        if index < len(self.layers):
            self.layers[index].input_bytes = sum(tensor.nbytes for tensor in tensors)
            for tensor in dense_tensors(used_by(value, index)):
                self._piece(tensor).used_by.add(index)
        self._forms[index] = (form_of(value),)
        self._operations.enter(index)
        self._in_forward = True
        self._known = len(self._pieces)  # saving what is there already allocates nothing
        self.mark()

    def forward_ends(self, index: int, output: Any) -> None:
        index += self._first
        self._in_forward = False
        self._operations.enter(None)
        self._forms[index] += (form_of(output),)
        tensors = dense_tensors(output)
        self._passed = [self._piece(tensor) for tensor in tensors]
        if index < len(self.layers):
            own = self.layers[index]
            own.output_bytes = sum(tensor.nbytes for tensor in tensors)
            own.output_gradient_bytes = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
            self._specs[index] = tensor_specs(output)
        newly_saved = 0
        for kept in filter(None, (reference() for reference in self._packed)):
            for part in dense_parts(kept.tensor):
                if part.untyped_storage()._cdata not in self._state:
                    piece = self._piece(part)
                    if not piece.layers:
                        newly_saved += piece.bytes if piece.number >= self._known else 0
                        piece.by_loss = index >= len(self.layers)
                    piece.layers.add(min(index, len(self.layers) - 1))
        self._packed.clear()
        self.costs_of(index).forward_workspace_bytes = max(self.peak - self.start - newly_saved, 0)

    def backward_starts(self, index: int, gradients: graph_cut.Gradients) -> None:
        # Values that pass a layer may get their first gradient from one of two layers that are equal otherwise.
        self._forms[self._first + index] += (tuple(gradient is None for gradient in gradients),)
        self._operations.enter(self._first + index)
        self.mark()

    def backward_ends(self, index: int) -> None:
        self._operations.enter(None)
        self.costs_of(self._first + index).workspace_bytes = self.peak - self.start

    def pack(self, tensor: Tensor) -> _Kept:
        """Called by autograd for each tensor that it saves; a graph that the forward drops releases it again."""
        kept = _Kept(tensor.detach())
        if self._in_forward:  # and not in the forward that a checkpoint repeats during the backward
            self._packed.append(weakref.ref(kept))
        return kept

    def run_of(self, index: int) -> Hashable:
        """Return a key of the input, the output, the gradients that arrive and the operations of a layer."""
        return *self._forms[index], self._operations.of(index)

    def memory(self) -> Memory:
        """Return the counts of all passes."""
        kept = [piece for piece in self._pieces if piece.layers or piece.input_of - {len(self.layers)}]
        for piece in kept:
            for layer in piece.layers:
                self.layers[layer].saved_bytes += piece.bytes
        saved = tuple(
            SavedTensor(
                bytes=piece.bytes,
                layers=tuple(sorted(piece.layers)),
                input_of=tuple(sorted(piece.input_of - {len(self.layers)})),
                passed_by=tuple(sorted(piece.input_of - piece.used_by - {len(self.layers)})),
            )
            for piece in kept
        )
        self.loss.saved_bytes = sum(piece.bytes for piece in kept if piece.by_loss)
        for index, own in enumerate(self.layers):
            own.forward_workspace_bytes += self._unsaved(index, index)
        if self.layers:
            self._count_loss_in(self.layers[-1])
        runs = [self.run_of(index) for index in range(len(self.layers))]
        return Memory(self.layers, self.loss, saved, self._specs, runs)

    def _unsaved(self, index: int, last: int) -> int:
        """Return the bytes that a layer gets as input and that no layer up to ``last`` saves."""
        return sum(
            piece.bytes
            for piece in self._pieces
            if index in piece.input_of and not any(layer <= last for layer in piece.layers)
        )

    def _count_loss_in(self, last: LayerBytes) -> None:
        """Add the workspace of the loss to that of the last layer, after which what the loss saves is there, too.

        The last layer runs before it is saved, and goes backward after it is released.
        """
        loss, released = self.loss, self.loss.saved_bytes
        loss.forward_workspace_bytes += self._unsaved(len(self.layers), len(self.layers))
        arriving = last.output_gradient_bytes
        for name, gradient in (
            ("forward_workspace_bytes", 0),
            ("workspace_bytes", arriving),
            ("input_workspace_bytes", arriving),
        ):
            setattr(last, name, max(getattr(loss, name), getattr(last, name) + gradient - released, 0))
        last.weight_workspace_bytes = max(last.weight_workspace_bytes, loss.weight_workspace_bytes)
        last.deferred_bytes += loss.deferred_bytes

    def _piece(self, tensor: Tensor) -> _Piece:
        storage = tensor.untyped_storage()
        piece = self._by_address.get(storage._cdata)
        if piece is None:
            piece = self._by_address[storage._cdata] = _Piece(storage.nbytes(), len(self._pieces))
            self._pieces.append(piece)
        return piece


def _make_gradients(model: nn.Module) -> None:
    """Give each parameter a gradient of zeros, except those whose module asks for sparse ones."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and not getattr(module, "sparse", False):
                parameter.grad = torch.zeros_like(parameter)
