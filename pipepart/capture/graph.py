"""LayerGraph: the layers of a model as nodes, the tensors between them as edges."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import networkx as nx
import torch
from pydantic import Field, field_validator

from ..document import ByteCount, Value


class TensorSpec(Value):
    """Shape, dtype and size of one tensor."""

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
        """As people read it: ``float32[8, 64]``."""
        return f"{self.dtype}{list(self.shape)}"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor, real or fake."""
        return cls(shape=tuple(int(n) for n in tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


class LayerInfo(Value):
    """What is known of a layer without running it.

    Attributes:
        name: path of the layer in the user's model, as in ``"features.3"``.
        kind: name of its class.
        description: its class and arguments, as its ``repr`` gives them.
        parameter_bytes: of its parameters, those left out that a layer before it holds too.
        gradient_bytes: of those that are trained.
        dtypes: of its parameters and buffers that hold no integers.
        shares_with: layers before this one that hold one of its parameters or buffers too.
        shared_bytes: of its parameters that a layer before it holds too, and of their gradients.
        outputs: the tensors it returns for the sample that was captured.
    """

    name: str
    kind: str
    description: str
    parameter_bytes: ByteCount
    gradient_bytes: ByteCount
    dtypes: tuple[str, ...] = ()
    shares_with: tuple[str, ...] = ()
    shared_bytes: ByteCount = 0
    outputs: tuple[TensorSpec, ...] = ()

    @property
    def output_bytes(self) -> int:
        """Size of what it returns."""
        return sum(spec.bytes for spec in self.outputs)


class LayerGraph(nx.DiGraph):
    """A directed graph of layers, nodes in the order in which they run.

    Node ``name`` carries ``layer`` (a :class:`LayerInfo`); edge ``(a, b)`` carries ``tensors`` (a tuple of
    :class:`TensorSpec`) and ``bytes``, their size together.
    """

    @classmethod
    def chain(cls, layers: list[LayerInfo], inputs: tuple[TensorSpec, ...]) -> LayerGraph:
        """Layers that each feed the next one; ``inputs`` is what the first one gets."""
        graph = cls(inputs=inputs)
        for layer in layers:
            graph.add_node(layer.name, layer=layer)
        for before, after in itertools.pairwise(layers):
            graph.add_edge(before.name, after.name, tensors=before.outputs, bytes=before.output_bytes)
        return graph

    @property
    def layers(self) -> list[LayerInfo]:
        """The layers in execution order."""
        attributes: Any = self.nodes(data="layer")
        return [layer for _, layer in attributes]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that the model is given."""
        return self.graph["inputs"]
