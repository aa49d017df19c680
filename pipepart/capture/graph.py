"""The graph of a model: layers as nodes, the tensors between them as edges."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import networkx as nx

from .layer_info import LayerInfo, TensorSpec


class LayerGraph(nx.DiGraph):
    """A directed acyclic graph of layers; nodes are in execution order.

    A node is the name of a layer. Its attribute ``layer`` is a :class:`LayerInfo`. Edge ``(a, b)`` means that layer
    ``b`` uses an output of layer ``a``. It has the attributes ``tensors`` (a tuple of :class:`TensorSpec`) and
    ``bytes``, their total size; a profile of a recorded model knows the bytes only. The graph does not hold the model.
    """

    @classmethod
    def chain(cls, layers: list[LayerInfo], inputs: tuple[TensorSpec, ...]) -> LayerGraph:
        """Build a chain graph: layer i feeds layer i + 1. ``inputs`` are the specs of the model's inputs."""
        graph = cls._of_layers(layers, inputs)
        for before, after in itertools.pairwise(layers):
            graph.add_edge(before.name, after.name, tensors=before.outputs, bytes=before.output_bytes)
        return graph

    @classmethod
    def recorded(
        cls,
        layers: list[LayerInfo],
        values: Iterable[tuple[Sequence[int], int, TensorSpec | None]],
        inputs: tuple[TensorSpec, ...],
    ) -> LayerGraph:
        """Build a graph from values between layers: index of the producer, indices of the users, bytes, spec if known.

        Arguments of the model are no edges.
        """
        graph = cls._of_layers(layers, inputs)
        for (maker, *users), size, spec in values:
            for user in users:
                edge = layers[maker].name, layers[user].name
                known = graph.get_edge_data(*edge, {"tensors": (), "bytes": 0})
                tensors = (*known["tensors"], spec) if spec else ()
                graph.add_edge(*edge, tensors=tensors, bytes=known["bytes"] + size)
        return graph

    @classmethod
    def _of_layers(cls, layers: list[LayerInfo], inputs: tuple[TensorSpec, ...]) -> LayerGraph:
        graph = cls(inputs=inputs)
        for layer in layers:
            graph.add_node(layer.name, layer=layer)
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
