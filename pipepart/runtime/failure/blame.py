"""Finds the layer whose backward failed, from the state of the autograd graph after the failure.

Autograd runs a whole stage in one call and does not say where it failed. A hook on every layer would cost a Python call
per layer and micro-batch. Instead the graph is inspected after the exception: a node that has run has freed its saved
tensors, a node that has not still holds them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from torch.autograd.graph import Node

_LEAF = 2**64 - 1  # the sequence number of AccumulateGrad nodes, which no layer has made


def failed_layers(ends: Sequence[int], roots: Iterable[Node], error: BaseException) -> list[int]:
    """Return the indices of the layers that may have failed, the likeliest first; the one after the last is the loss.

    Args:
        ends: the number that autograd would have given to the next node when each layer had run, in their order.
        roots: of the graph.
        error: what the backward raised. A frame of a ``torch.autograd.Function`` in its traceback names the
            node for certain; else the layer is the last one with a node that has not run, and later layers whose nodes
            save nothing cannot be distinguished from it.
    """
    parts = _nodes_of_layers(ends, roots)
    if certain := _made_any(parts, _nodes_in_traceback(error.__traceback__)):
        return certain[:1]
    doubtful: list[int] = []
    for index in reversed(range(len(parts))):
        states = {_has_run(node) for node in parts[index]}
        if False in states:
            return [index, *reversed(doubtful)]
        if True in states:
            doubtful.clear()
        elif states:
            doubtful.append(index)
    return doubtful[::-1] or [max((index for index, part in enumerate(parts) if part), default=0)]


def layers_of(ends: Sequence[int], roots: Iterable[Node], nodes: Iterable[Node]) -> list[int]:
    """Return the indices of the layers that made any of the nodes; ``ends`` and ``roots`` as above."""
    return _made_any(_nodes_of_layers(ends, roots), nodes)


def _made_any(parts: Sequence[set[Node]], nodes: Iterable[Node]) -> list[int]:
    wanted = set(nodes)
    return [index for index, part in enumerate(parts) if wanted & part]


def _nodes_of_layers(ends: Sequence[int], roots: Iterable[Node]) -> list[set[Node]]:
    """The nodes that each layer made, by sequence number; the node of a leaf counts to the layer that uses it."""
    parts: list[set[Node]] = [set() for _ in range(len(ends) + 1)]
    seen: set[Node] = set()
    waiting: list[tuple[Node | None, int]] = [(root, len(ends)) for root in roots]
    while waiting:
        node, user = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        index = user if number == _LEAF else bisect_right(ends, number)
        parts[index].add(node)
        waiting.extend((following, index) for following, _ in node.next_functions)
    return parts


def _nodes_in_traceback(traceback: TracebackType | None) -> Iterator[Node]:
    """The contexts of custom autograd functions in a traceback; each context is a node of the graph."""
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, Node):
                yield value
        traceback = traceback.tb_next


def _has_run(node: Node) -> bool | None:
    """Return True if a node has freed its saved tensors; None if it saves none, so that this is unknown."""
    seen: bool | None = None
    for name in dir(node):
        if not name.startswith("_saved_") and name != "saved_tensors":
            continue
        try:
            value = getattr(node, name)
        except Exception as error:  # unpacking may run a user's hook, too
            if "already been freed" in str(error):
                return True
            continue
        if hasattr(value, "grad_fn") or (
            isinstance(value, tuple) and any(hasattr(v, "grad_fn") for v in value)
        ):
            seen = False
    return seen
