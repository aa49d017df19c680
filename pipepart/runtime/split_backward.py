"""Runs the backward of a graph in two parts: down to its inputs at once, into its weights when there is time.

::

    gradient of the output ─▶ layer ─▶ gradient of its input ─▶ ...     first part (I)
                                └─ kept, with the layer's input
                                   └─▶ gradient of its weight           second part (W)

The first part is one run of autograd's engine that is told to stay out of those weights; a hook on the node of each
such layer keeps the gradient that arrives. The second part computes what the node would have, and lets autograd carry
it to the weight. What is no weight of a known type of layer is done in the first part. The forward knows nothing of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from .. import boundary
from .weight_gradients import KNOWN, Formula, read_formula

# Gradients of two uses add up to the same bits in either order; those of more do not, and would be kept one by one.
_MOST_USES = 2

# What may lie between a weight and the layer that uses it: views of it, and casts.
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "Unsqueeze", "ToCopy"),
        *("Split", "SplitWithSizes", "Slice", "Select", "Unbind"),
    )
)


class WeightGradients:
    """The second part of one backward: holds the inputs and output gradients of the layers whose weights wait."""

    def __init__(self, arrived: Iterable[tuple[_Use, Tensor]] = ()) -> None:
        self._arrived = deque(arrived)

    def __len__(self) -> int:
        return len(self._arrived)

    def accumulate(self) -> None:
        """Computes the gradients and adds each to its weight's ``grad``. Holds nothing afterwards.

        Raises:
            RuntimeError: a layer's input has been written into since the first part.
        """
        left = Counter(end for use, _ in self._arrived for end in use.ends)
        waiting: dict[Node, list[tuple[GradientEdge, Tensor]]] = {}
        with torch.no_grad():
            while self._arrived:
                _accumulate(*self._arrived.popleft(), left, waiting)


def backward_inputs(roots: Sequence[GradientEdge], gradients: boundary.Gradients) -> WeightGradients:
    """The first part: runs the backward from the roots but for the weights that can wait, and returns those.

    The gradients of everything else are in ``grad``, as after :func:`pipepart.boundary.backward`.
    """
    start = [root.node for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
    uses, ends = _survey(start)
    uses = _that_can_wait(uses, ends)
    arrived: list[tuple[_Use, Tensor]] = []
    for node, use in uses.items():
        node.register_prehook(partial(_keep, arrived, use))
    # Without uses there are no targets either, and autograd does all there is.
    targets = [GradientEdge(node, 0) for node in (*uses, *ends)] if uses else ()
    boundary.backward(roots, gradients, targets)
    return WeightGradients(arrived)


class _Use(NamedTuple):
    """One use of weights: for each the edge from the layer's node towards it, and the node that accumulates there.

    It does not hold the layer's node, and with it the graph.
    """

    edges: tuple[GradientEdge, ...]
    ends: tuple[Node, ...]
    formula: Formula
    versions: tuple[int, ...]


def _survey(start: Sequence[Node]) -> tuple[dict[Node, _Use], set[Node]]:
    """Walks a graph: the layers whose weights may wait, and where gradients accumulate that are not theirs."""
    uses: dict[Node, _Use] = {}
    ends: set[Node] = set()
    seen = set(start)
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        edges = node.next_functions
        name = type(node).__name__
        if name == "AccumulateGrad":
            ends.add(node)
        elif "Checkpoint" in name:
            return {}, set()  # the reentrant one refuses a backward that is told where to go
        elif name in KNOWN:
            known = KNOWN[name]
            weights = [(slot, end) for slot in known.slots if (end := _weight(edges[slot][0])) is not None]
            slots = [slot for slot, _ in weights]
            formula = read_formula(known, node, slots) if weights else None
            if formula is not None:
                uses[node] = _use(edges, weights, formula)
                edges = [edge for slot, edge in enumerate(edges) if slot not in slots]
        for following, _ in edges:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return uses, ends


def _use(edges: Sequence[Any], weights: Sequence[tuple[int, Node]], formula: Formula) -> _Use:
    return _Use(
        tuple(GradientEdge(*edges[slot]) for slot, _ in weights),
        tuple(end for _, end in weights),
        formula,
        tuple(tensor._version for tensor in formula.kept),
    )


def _weight(node: Any) -> Node | None:
    """The node that accumulates the gradient of the parameter that a node gives a view of, if it does."""
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    if type(node).__name__ != "AccumulateGrad":
        return None
    weight = node.variable
    # A hook expects to be called in the one backward, with the others.
    hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return node if type(weight) is nn.Parameter and not hooked else None


def _that_can_wait(uses: dict[Node, _Use], ends: set[Node]) -> dict[Node, _Use]:
    """Those of the uses whose weights are used by nothing else. The ends of the others are added to ``ends``."""
    counts = Counter(end for use in uses.values() for end in use.ends)
    ends.update(end for end, count in counts.items() if count > _MOST_USES)
    while True:
        others = [node for node, use in uses.items() if not ends.isdisjoint(use.ends)]
        if not others:
            return uses
        for node in others:
            ends.update(uses.pop(node).ends)


def _keep(arrived: list[tuple[_Use, Tensor]], use: _Use, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[0] is not None:
        arrived.append((use, gradients[0]))


def _accumulate(
    use: _Use, gradient: Tensor, left: Counter[Node], waiting: dict[Node, list[tuple[GradientEdge, Tensor]]]
) -> None:
    """Adds up the gradients of one use; those of a weight with another use to come wait for that."""
    if use.versions != tuple(tensor._version for tensor in use.formula.kept):
        raise RuntimeError(
            "the input of a layer has been written into before the gradients of the layer's weights were computed "
            "from it. Give each micro-batch a tensor of its own, or take a schedule that computes them in "
            "one backward"
        )
    ready: list[tuple[GradientEdge, Tensor]] = []
    for edge, end, found in zip(use.edges, use.ends, use.formula.gradients(gradient), strict=True):
        waiting.setdefault(end, []).append((edge, found))
        left[end] -= 1
        if not left[end]:
            ready += waiting.pop(end)
    boundary.backward([edge for edge, _ in ready], [found for _, found in ready])
