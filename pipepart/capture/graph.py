"""The graph of a model: layers as nodes, the tensors between them as edges."""

from __future__ import annotations

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
    def of(
        cls,
        layers: list[LayerInfo],
        values: Iterable[tuple[Sequence[int], int, tuple[TensorSpec, ...]]],
        inputs: tuple[TensorSpec, ...],
    ) -> LayerGraph:
        """Build a graph of layers and the values between them.

        Args:
            layers: in execution order.
            values: index of the layer that makes a value and of those that use it, bytes, and specs if known. Arguments
                of the model are none.
            inputs: the specs of the model's inputs.
        """
        graph = cls(inputs=inputs)
        for layer in layers:
            graph.add_node(layer.name, layer=layer)
        for (maker, *users), size, specs in values:
            for user in users:
                edge = layers[maker].name, layers[user].name
                known = graph.get_edge_data(*edge, {"tensors": (), "bytes": 0})
                graph.add_edge(*edge, tensors=(*known["tensors"], *specs), bytes=known["bytes"] + size)
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
