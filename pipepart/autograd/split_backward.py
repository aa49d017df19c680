"""Splits a backward in two: gradients of the inputs first, gradients of the weights later.

::

    gradient of the output ─▶ layer ─▶ gradient of its input ─▶ ...     first part (I)
                                └─ kept, with the layer's input
                                   └─▶ gradient of its weight           second part (W)

The first part is one run of autograd's engine that excludes the deferred weights. A hook on the node of each of their
layers keeps the gradient that arrives there. The second part computes the weight gradient as the node would have, and
passes it to the weight through autograd. Weights of unknown layer types, and those that a stage uses twice, get their
gradients in the first part: autograd sums the gradients of several uses in an order of its own. The forward does not
depend on the split.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ..dtensors import is_dtensor
from . import graph_cut
from .sparse import bytes_of
from .weight_gradients import KNOWN, Formula, Known, read_formula

# Starting autograd's engine takes longer than adding a small gradient, so small gradients share one run.
# Larger ones do not: the memory of a layer's W is predicted for that layer alone.
_BYTES_AT_ONCE = 2**16

# Nodes that may lie between a weight and the layer that uses it: views and casts.
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "Unsqueeze", "ToCopy"),
        *("Split", "SplitWithSizes", "Slice", "Select", "Unbind"),
    )
)


class WeightGradients:
    """The second part of a backward: holds the inputs and output gradients from which weight gradients are computed."""

    def __init__(self, arrived: Iterable[tuple[_Use, Tensor]] = ()) -> None:
        self._arrived = deque(arrived)

    def __len__(self) -> int:
        return len(self._arrived)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the held tensors: inputs of layers, and gradients of their outputs."""
        for use, gradient in self._arrived:
            yield gradient
            yield from use.formula.kept

    def accumulate(self) -> None:
        """Compute the gradients, add each to its weight's ``grad``, and release all tensors.

        Raises:
            RuntimeError: a layer's input has been written into since the first part.
        """
        ready: list[_Found] = []
        with torch.no_grad():
            while self._arrived:
                use, gradient = self._arrived.popleft()
                ready += _compute(use, gradient)
                if not self._arrived or sum(bytes_of(entry.gradient) for entry in ready) >= _BYTES_AT_ONCE:
                    graph_cut.backward([entry.edge for entry in ready], [entry.gradient for entry in ready])
                    ready.clear()


def backward_inputs(roots: Sequence[GradientEdge], gradients: graph_cut.Gradients) -> WeightGradients:
    """Run the first part of a backward, and return the deferred weight gradients.

    All other gradients are in ``grad``, as after :func:`pipepart.autograd.graph_cut.backward`.
    """
    start = [root.node for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
    uses, ends = _survey(start)
    uses = _used_once(uses, ends)
    arrived = _keep_what_arrives(uses)
    # Nothing can be deferred: an ordinary backward.
    targets = [GradientEdge(node, 0) for node in (*uses, *ends)] if uses else ()
    graph_cut.backward(roots, gradients, targets)
    return WeightGradients(arrived)


class _Use(NamedTuple):
    """One layer's use of weights: for each weight, the edge from the layer's node to it and its accumulating node.

    The layer's node is not stored, because it would keep the graph alive.
    """

    edges: list[tuple[Node, int]]
    ends: list[Node]
    formula: Formula
    versions: list[int]


class _Found(NamedTuple):
    """A weight's gradient from one use, the node that accumulates it, and the edge that leads there."""

    end: Node
    edge: GradientEdge
    gradient: Tensor


def _survey(start: Sequence[Node]) -> tuple[dict[Node, _Use], set[Node]]:
    """Walk a graph; return the layers with deferrable weights, and the nodes that accumulate all other gradients."""
    uses: dict[Node, _Use] = {}
    ends: set[Node] = set()
    seen = set(start)
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        edges: Sequence[Any] = node.next_functions
        name = type(node).__name__
        if name == "AccumulateGrad":
            ends.add(node)
        elif name in KNOWN:
            use, edges = _use(KNOWN[name], node, edges)
            if use is not None:
                uses[node] = use
        elif "Checkpoint" in name:
            return {}, set()  # a reentrant checkpoint refuses a backward with given inputs
        for following, _ in edges:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return uses, ends


def _use(known: Known, node: Node, edges: Sequence[Any]) -> tuple[_Use | None, Sequence[Any]]:
    """Return the use of deferrable weights by a node of a known type, or None, and the node's other edges."""
    ends = {slot: end for slot in known.slots if (end := _weight(edges[slot][0])) is not None}
    formula = read_formula(known, node, list(ends))
    if formula is None:
        return None, edges
    versions = [tensor._version for tensor in formula.kept]
    edges_here = [edges[slot] for slot in ends]
    use = _Use(edges_here, list(ends.values()), formula, versions)
    return use, [edge for slot, edge in enumerate(edges) if slot not in ends]


def _weight(node: Any) -> Node | None:
    """Return the node that accumulates the gradient of a parameter, if the given node is it or a view or cast of it."""
    while (name := type(node).__name__) in _VIEWS:
        node = node.next_functions[0][0]
    if name != "AccumulateGrad":
        return None
    weight = node.variable
    # A parameter with a hook is not deferred: hooks expect to be called in one backward.
    hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return node if (type(weight) is nn.Parameter or is_dtensor(weight)) and not hooked else None


def _used_once(uses: dict[Node, _Use], ends: set[Node]) -> dict[Node, _Use]:
    """Return the uses whose weights nothing else uses. The accumulating nodes of the others are added to ``ends``."""
    counts = Counter(end for use in uses.values() for end in use.ends)
    ends.update(end for end, count in counts.items() if count > 1)
    while True:
        others = [node for node, use in uses.items() if not ends.isdisjoint(use.ends)]
        if not others:
            return uses
        for node in others:
            ends.update(uses.pop(node).ends)


def _keep_what_arrives(uses: dict[Node, _Use]) -> list[tuple[_Use, Tensor]]:
    """Add hooks that keep the output gradient of each use, in the order of the backward."""
    arrived: list[tuple[_Use, Tensor]] = []
    for node, use in uses.items():
        node.register_prehook(partial(_keep, arrived, use))
    return arrived


def _keep(arrived: list[tuple[_Use, Tensor]], use: _Use, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[0] is not None:
        arrived.append((use, gradients[0]))


def _compute(use: _Use, gradient: Tensor) -> list[_Found]:
    """Return the weight gradients of one use."""
    if [tensor._version for tensor in use.formula.kept] != use.versions:
        raise RuntimeError(
            "the input of a layer has been written into before the gradients of the layer's weights were computed "
            "from it. Give each micro-batch a tensor of its own, or take a schedule that computes them in "
            "one backward"
        )
    products = zip(use.ends, use.edges, use.formula.gradients(gradient), strict=True)
    return [_Found(end, GradientEdge(*edge), computed) for end, edge, computed in products]
