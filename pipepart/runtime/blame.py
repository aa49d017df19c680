"""Finds the layer whose backward failed, from what the failure left behind.

Autograd runs a whole stage in one call and does not say where it was. Watching every layer would cost a Python call
per layer and micro-batch, so nothing is watched: once an exception is there, the graph tells how far it came.
A node that has run has given up what it saved, one that has not still holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from torch.autograd.graph import Node


def failed_layers(outputs: Sequence[Node | None], error: BaseException) -> list[int]:
    """The indices of the layers that may have failed, the likeliest first.

    Args:
        outputs: the autograd node of each layer's output, in order of the layers; behind them that of the loss.
        error: what the backward raised. A frame of a ``torch.autograd.Function`` in its traceback names the
            node for certain; else the layer is the last one with a node that has not run, and layers behind it
            whose nodes save nothing cannot be told from it.
    """
    if certain := layers_of(outputs, _nodes_in_traceback(error.__traceback__)):
        return certain[:1]
    parts = _nodes_of_layers(outputs)
    doubtful: list[int] = []
    for index in reversed(range(len(parts))):
        states = {_has_run(node) for node in parts[index]}
        if False in states:
            return [index, *reversed(doubtful)]
        if True in states:
            doubtful.clear()
        elif states:
            doubtful.append(index)
    return doubtful[::-1] or [len(parts) - 1]


def layers_of(outputs: Sequence[Node | None], nodes: Iterable[Node]) -> list[int]:
    """The indices of the layers that made any of the nodes; ``outputs`` as above."""
    wanted = set(nodes)
    if not wanted:
        return []
    return [index for index, part in enumerate(_nodes_of_layers(outputs)) if wanted & part]


def _nodes_of_layers(outputs: Sequence[Node | None]) -> list[set[Node]]:
    """The nodes that each layer made: those reached from its output and from no output before it."""
    seen: set[Node] = set()
    parts = []
    for output in outputs:
        part: set[Node] = set()
        waiting = [output]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                part.add(node)
                waiting.extend(following for following, _ in node.next_functions)
        parts.append(part)
    return parts


def _nodes_in_traceback(traceback: TracebackType | None) -> Iterator[Node]:
    """Contexts of custom autograd functions: each is itself the node of the graph."""
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, Node):
                yield value
        traceback = traceback.tb_next


def _has_run(node: Node) -> bool | None:
    """Whether a node has given up its saved tensors; None where it saves none, so that nothing can be seen."""
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
