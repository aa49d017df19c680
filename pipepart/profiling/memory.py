"""Counts the memory of each layer of a chain: inputs, outputs, saved tensors, workspace and deferred gradients."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..autograd import graph_cut
from ..autograd.dispatch_mode import DispatchMode, on_shards
from ..autograd.own_copy import tensors as tensors_of
from ..autograd.sparse import bytes_of, dense_parts, dense_tensors
from ..autograd.split_backward import WeightGradients
from ..capture import TensorSpec, tensor_specs, used_by
from ..dtensors import is_dtensor
from .costs import Collective, CollectiveKind, SavedTensor
from .layer_pass import LayerPass, Observer


@dataclass
class LayerBytes:
    """Byte counts of one layer, with the field names of :class:`LayerCost`."""

    saved_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    output_gradient_bytes: int = 0
    workspace_bytes: int = 0
    forward_workspace_bytes: int = 0
    input_workspace_bytes: int = 0
    weight_workspace_bytes: int = 0
    deferred_bytes: int = 0
    forward_collectives: tuple[Collective, ...] = ()
    backward_collectives: tuple[Collective, ...] = ()


@dataclass
class Memory:
    """The memory of a chain.

    Attributes:
        layers: byte counts of each layer. The last layer includes the loss.
        loss: byte counts of the loss alone: what it saves, and its workspace.
        saved: the memory kept from forward to backward, one entry per storage.
        outputs: the specs of each layer's outputs.
    """

    layers: list[LayerBytes]
    loss: LayerBytes
    saved: tuple[SavedTensor, ...]
    outputs: list[tuple[TensorSpec, ...]]


class Allocations(DispatchMode):
    """Counts the bytes of each storage from its allocation by a torch operation until it is freed.

    Memory that a kernel allocates internally is not counted.

    Attributes:
        allocated: bytes allocated now.
        peak: largest value of ``allocated`` since the last :meth:`mark`.
        start: value of ``allocated`` at the last :meth:`mark`.
        ignored: addresses of storages that do not count.
    """

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.allocated = self.peak = self.start = 0
        self.ignored = ignored

    def mark(self) -> None:
        """Set ``start`` and ``peak`` to the bytes allocated now."""
        self.start = self.peak = self.allocated

    def collective(self, kind: CollectiveKind, size: int) -> None:
        """Called after a collective, with the bytes of the larger one of its input and output."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if on_shards(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if (kind := collective_kind(func)) is not None:
            self.collective(kind, max(map(bytes_of, (result, *args))))
        for tensor in dense_tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata in self.ignored or hasattr(storage, "_pipepart_token"):
                continue
            if all(storage._cdata != used.untyped_storage()._cdata for used in dense_tensors((args, kwargs))):
                storage._pipepart_token = _Token(self, storage.nbytes())  # type: ignore[attr-defined]
        return result


class _Token:
    """An attribute of a storage that counts its bytes until the storage is freed."""

    __slots__ = ("counter", "size")

    def __init__(self, counter: Allocations, size: int) -> None:
        self.counter, self.size = counter, size
        counter.allocated += size
        counter.peak = max(counter.peak, counter.allocated)

    def __del__(self) -> None:
        self.counter.allocated -= self.size


@dataclass
class _Piece:
    """One storage, with the indices of the layers that save it, take it as an input, and read that input.

    The index of the loss is the number of layers.
    """

    bytes: int
    saved_by: set[int] = field(default_factory=set)
    input_of: set[int] = field(default_factory=set)
    used_by: set[int] = field(default_factory=set)


class MemoryCount(Allocations, Observer):
    """Counts the memory of a chain, in one pass over all layers or in one pass per part of the chain.

    Observes when each storage is allocated and freed, and which storages autograd saves for the backward. A storage
    that several tensors share counts once. Parameters, buffers and their gradients do not count.

    A storage is identified by its address. Within a pass no address is reused before the first backward, because the
    pass holds every input and every graph. Between passes, the inputs of a part are matched by position with the
    outputs of the part before it.

    Args:
        layers: number of layers in the whole chain, without the loss.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(ignored=set())
        self._costs = [LayerBytes() for _ in range(layers + 1)]  # one per layer, then the loss
        self._last = layers - 1
        self._first = 0  # index in the chain of the running part's first layer
        self._in_forward = False
        self._is_split = False  # whether the running pass has a split backward
        self._pieces: list[_Piece] = []
        self._by_address: dict[int, _Piece] = {}
        self._collectives: Counter[tuple[CollectiveKind, int]] = Counter()  # of the running part
        self._known: frozenset[int] = frozenset()  # addresses in use before the current forward
        self._passed: list[_Piece] = []
        self._packed: list[weakref.ref[_Saved]] = []
        self._specs: list[tuple[TensorSpec, ...]] = [()] * layers

    def add(self, model: nn.Module, part: LayerPass, value: Any, first: int = 0) -> None:
        """Count the memory of a part of the chain in two passes: with a whole backward and with a split backward.

        Gradients of all parameters are allocated before, as for every micro-batch of a step but the first. The first
        micro-batch needs less memory.

        Args:
            model: the module that holds the parameters and buffers of the part.
            part: consecutive layers, or the loss.
            value: the input of the part: the output of the part before it or a copy of that output, except for the
                first part.
            first: the index in the chain of the part's first layer.
        """
        _make_gradients(model)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        tensors = (*model.parameters(), *model.buffers(), *gradients)
        self.ignored = {piece.untyped_storage()._cdata for tensor in tensors for piece in dense_parts(tensor)}
        self._first = first
        self._by_address.clear()
        self._is_split = False
        if any(map(is_dtensor, model.parameters())):
            # The first operation on DTensors of a kind also runs on fake tensors, to find how its result is sharded.
            with self, saved_tensors_hooks(self._pack, _Saved.unpack):
                for split in (False, True):
                    part.run(value, Observer(), split=split)
        with self, saved_tensors_hooks(self._pack, _Saved.unpack):
            part.run(value, self)
        self._is_split = True
        with self:
            part.run(value, self, split=True)

    def memory(self) -> Memory:
        """Return the memory of the whole chain, after all parts were added."""
        *layers, loss = self._costs
        saved: list[SavedTensor] = []
        for piece in self._pieces:
            savers, inputs = self._in_layers(piece.saved_by), piece.input_of - {len(layers)}
            if not savers and not inputs:
                continue
            for layer in savers:
                layers[layer].saved_bytes += piece.bytes
            if min(piece.saved_by, default=0) == len(layers):
                loss.saved_bytes += piece.bytes
            saved.append(
                SavedTensor(
                    bytes=piece.bytes,
                    layers=tuple(sorted(savers)),
                    input_of=tuple(sorted(inputs)),
                    passed_by=tuple(sorted(inputs - piece.used_by)),
                )
            )
        for index, cost in enumerate(self._costs):
            cost.forward_workspace_bytes += self._unsaved_inputs(index)
        _count_loss_in(layers[-1], loss)
        return Memory(layers, loss, tuple(saved), self._specs)

    def _in_layers(self, indices: set[int]) -> set[int]:
        """Return the indices with that of the loss replaced by that of the last layer."""
        return {min(index, self._last) for index in indices}

    def _unsaved_inputs(self, index: int) -> int:
        """Return the bytes of a layer's inputs that neither this layer nor an earlier layer saves."""
        return sum(
            piece.bytes
            for piece in self._pieces
            if index in piece.input_of and min(self._in_layers(piece.saved_by), default=index + 1) > index
        )

    def forward_starts(self, index: int, value: Any) -> None:
        if self._is_split:
            return
        index += self._first
        tensors = dense_tensors(value)
        if index:
            for tensor, piece in zip(tensors, self._passed, strict=True):
                self._by_address.setdefault(tensor.untyped_storage()._cdata, piece)
        for tensor in tensors:
            self._piece(tensor).input_of.add(index)
        if index <= self._last:
            self._costs[index].input_bytes = sum(tensor.nbytes for tensor in tensors)
            for tensor in dense_tensors(used_by(value, index)):
                self._piece(tensor).used_by.add(index)
        self._in_forward = True
        self._known = frozenset(self._by_address)
        self._collectives.clear()
        self.mark()

    def forward_ends(self, index: int, output: Any) -> None:
        if self._is_split:
            return
        index += self._first
        self._in_forward = False
        tensors = dense_tensors(output)
        self._passed = [self._piece(tensor) for tensor in tensors]
        cost = self._costs[index]
        if index <= self._last:
            cost.output_bytes = sum(tensor.nbytes for tensor in tensors)
            cost.output_gradient_bytes = bytes_of([each for each in tensors_of(output) if each.requires_grad])
            self._specs[index] = tensor_specs(output)
        newly_saved = 0  # bytes allocated in this forward and saved
        for saved in filter(None, (reference() for reference in self._packed)):
            for part in dense_parts(saved.tensor):
                address = part.untyped_storage()._cdata
                if address not in self.ignored:
                    piece = self._piece(part)
                    if not piece.saved_by and address not in self._known:
                        newly_saved += piece.bytes
                    piece.saved_by.add(index)
        self._packed.clear()
        cost.forward_workspace_bytes = max(self.peak - self.start - newly_saved, 0)
        cost.forward_collectives = self._counted()

    def backward_starts(self, index: int, gradients: graph_cut.Gradients) -> None:
        self._collectives.clear()
        self.mark()

    def input_gradients_done(self, index: int, deferred: WeightGradients | None) -> None:
        if deferred is None:
            return
        cost = self._costs[self._first + index]
        cost.input_workspace_bytes = self.peak - self.start
        storages = {
            part.untyped_storage()._cdata: part.untyped_storage().nbytes()
            for tensor in deferred.tensors()
            for part in dense_parts(tensor)
        }
        cost.deferred_bytes = sum(size for address, size in storages.items() if address not in self.ignored)
        self.mark()

    def backward_ends(self, index: int) -> None:
        cost, workspace = self._costs[self._first + index], self.peak - self.start
        if self._is_split:
            cost.weight_workspace_bytes = workspace
        else:
            cost.workspace_bytes = workspace
            cost.backward_collectives = self._counted()

    def collective(self, kind: CollectiveKind, size: int) -> None:
        self._collectives[kind, size] += 1

    def _counted(self) -> tuple[Collective, ...]:
        """Return the collectives of the running forward or backward."""
        return tuple(
            Collective(kind=kind, bytes=size, count=count)
            for (kind, size), count in self._collectives.items()
        )

    def _pack(self, tensor: Tensor) -> _Saved:
        """Wrap a tensor that autograd saves. The wrapper is freed if the forward drops its graph."""
        saved = _Saved(tensor.detach())
        if self._in_forward:  # not when a checkpoint repeats the forward during the backward
            self._packed.append(weakref.ref(saved))
        return saved

    def _piece(self, tensor: Tensor) -> _Piece:
        storage = tensor.untyped_storage()
        piece = self._by_address.get(storage._cdata)
        if piece is None:
            piece = self._by_address[storage._cdata] = _Piece(storage.nbytes())
            self._pieces.append(piece)
        return piece


class _Saved:
    """Replaces a saved tensor in autograd; it is deleted when autograd would free the tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> Tensor:
        return self.tensor


_COLLECTIVES: Mapping[str, CollectiveKind] = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
}


def collective_kind(func: Any) -> CollectiveKind | None:
    """Return the kind of a collective; None for any other operation."""
    if func.namespace not in ("_c10d_functional", "c10d"):
        return None
    name = func.overloadpacket.__name__.replace("_", "")
    return next((kind for part, kind in _COLLECTIVES.items() if name.startswith(part)), None)


def _count_loss_in(last: LayerBytes, loss: LayerBytes) -> None:
    """Add the byte counts of the loss to those of the last layer.

    The last layer runs its forward before the loss saves tensors, and its backward after they are freed. The combined
    saved bytes include these tensors, so their size is subtracted from the workspace of the last layer. The combined
    workspace is the larger of this difference and the workspace of the loss.
    """
    gradient_bytes = last.output_gradient_bytes
    for name, gradient in (
        ("forward_workspace_bytes", 0),
        ("workspace_bytes", gradient_bytes),
        ("input_workspace_bytes", gradient_bytes),
    ):
        alone = getattr(last, name) + gradient - loss.saved_bytes
        setattr(last, name, max(getattr(loss, name), alone, 0))
    last.weight_workspace_bytes = max(last.weight_workspace_bytes, loss.weight_workspace_bytes)
    last.deferred_bytes += loss.deferred_bytes


def _make_gradients(model: nn.Module) -> None:
    """Set the gradient of each parameter to zeros, except in modules with sparse gradients."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and not getattr(module, "sparse", False):
                parameter.grad = torch.zeros_like(parameter)
