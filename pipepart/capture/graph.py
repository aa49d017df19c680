"""The graph of a model: layers as nodes, the tensors between them as edges."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated, Any

import networkx as nx
import torch
from pydantic import Field, field_validator

from ..document import ByteCount, Value


class TensorSpec(Value):
    """Shape and dtype of one tensor."""

    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str

    @field_validator("dtype")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"torch has no dtype {name!r}")
        return name

    @property
    def bytes(self) -> int:
        """Size in bytes of a dense tensor of this shape."""
        size: int = getattr(torch, self.dtype).itemsize
        for extent in self.shape:
            size *= extent
        return size

    @property
    def text(self) -> str:
        """Dtype and shape for people, such as ``float32[8, 64]``."""
        return f"{self.dtype}{list(self.shape)}"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor."""
        return cls(shape=tuple(int(n) for n in tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


class SharedTensor(Value):
    """A parameter or buffer of a layer that an earlier layer also holds.

    Attributes:
        layer: the first layer that holds it.
        name: its path in that layer, as in ``"weight"``.
        bytes: its size.
        gradient_bytes: the size of its gradient; 0 for a buffer or a frozen parameter.
    """

    layer: str
    name: str
    bytes: ByteCount
    gradient_bytes: ByteCount = 0


class LayerInfo(Value):
    """Facts about one layer. Bytes count each tensor once: in the first layer that holds it.

    Attributes:
        name: path of the layer in the user's model, as in ``"features.3"``.
        kind: name of its class.
        description: its class and arguments, as its ``repr`` gives them.
        parameter_bytes: size of its parameters, without shared ones.
        gradient_bytes: size of the gradients of these parameters.
        buffer_bytes: size of its buffers, without shared ones.
        dtypes: floating point and complex dtypes of its parameters and buffers.
        shared: its parameters and buffers that an earlier layer also holds.
        outputs: the tensors it returns for one micro-batch; empty if the layer was not run.
    """

    name: str
    kind: str
    description: str
    parameter_bytes: ByteCount
    gradient_bytes: ByteCount
    buffer_bytes: ByteCount = 0
    dtypes: tuple[str, ...] = ()
    shared: tuple[SharedTensor, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    @property
    def shares_with(self) -> tuple[str, ...]:
        """The earlier layers that own the tensors in ``shared``."""
        return tuple(sorted({tensor.layer for tensor in self.shared}))

    @property
    def output_bytes(self) -> int:
        """Size of the tensors it returns."""
        return sum(spec.bytes for spec in self.outputs)


class LayerGraph(nx.DiGraph):
    """A directed acyclic graph of layers; nodes are in execution order.

    A node is the name of a layer. Its attribute ``layer`` is a :class:`LayerInfo`. Edge ``(a, b)`` means that layer
    ``b`` uses an output of layer ``a``. It has the attributes ``tensors`` (a tuple of :class:`TensorSpec`) and
    ``bytes``, their total size. The graph does not hold the model.
    """

    @classmethod
    def chain(cls, layers: list[LayerInfo], inputs: tuple[TensorSpec, ...]) -> LayerGraph:
        """Build a chain graph: layer i feeds layer i + 1. ``inputs`` are the specs of the model's inputs."""
        graph = cls(inputs=inputs)
        for layer in layers:
            graph.add_node(layer.name, layer=layer)
        for before, after in itertools.pairwise(layers):
            graph.add_edge(before.name, after.name, tensors=before.outputs, bytes=before.output_bytes)
        return graph

    @classmethod
    def branched(
        cls, layers: list[LayerInfo], edges: Iterable[tuple[str, str]], inputs: tuple[TensorSpec, ...]
    ) -> LayerGraph:
        """Build a graph with branches: for each pair ``(a, b)`` of names, layer b uses all outputs of layer a."""
        graph = cls(inputs=inputs)
        for layer in layers:
            graph.add_node(layer.name, layer=layer)
        made = {layer.name: layer for layer in layers}
        for before, after in edges:
            graph.add_edge(before, after, tensors=made[before].outputs, bytes=made[before].output_bytes)
        return graph

    @property
    def layers(self) -> list[LayerInfo]:
        """The layers in execution order."""
        attributes: Any = self.nodes(data="layer")
        return [layer for _, layer in attributes]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the model's inputs."""
        return self.graph["inputs"]
