"""Activation recomputation: a forward whose graph is dropped at once, and the same forward again before its backward.

::

    F(s, k)          message ──▶ layers ──▶ output ──▶ next stage        graph dropped, message and buffers kept
    RECOMPUTE(s, k)  message ──▶ layers ──▶ roots                        same draws, same buffers, graph kept
    B(s, k)          gradients ──▶ roots ──▶ gradients of the message

Both forwards run with gradients on, in the caller's autocast, so that layers which ask for either do the same twice.
The loss runs once, behind the second forward of the last stage: until then it is not needed, and nor is the output.
A forward that has spoiled what a second would need (it wrote into its input or into a buffer unforeseen) keeps its
graph instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...autograd import graph_cut
from ...autograd.own_copy import tensors
from ..stage import Made, Stage
from .buffers import Values, version
from .randomness import Draws, Turn


class Kept(NamedTuple):
    """What a stage keeps of one micro-batch between its two forwards.

    Attributes:
        message: its input.
        versions: of the tensors of its input, by which a write of another stage is noticed.
        buffers: values that buffers had before the first forward, of those that it wrote.
        roots: how many tensors of the output asked for a gradient; None where the output has gone nowhere yet.
    """

    message: Any
    versions: tuple[int, ...]
    buffers: Values
    roots: int | None = None


def first_forward(stage: Stage, message: Any, micro_batch: int, draws: Draws) -> tuple[Made, Kept | None]:
    """Runs the layers; the second value is None where they cannot be run a second time."""
    message = graph_cut.move(message, stage.device)
    versions = _versions(message)
    noted = stage.buffers.note()
    made = stage.forward(message, micro_batch, draws, Turn.FIRST)
    buffers = stage.buffers.values(noted)
    if buffers is None or _versions(message) != versions:
        return made, None
    return made, Kept(message, versions, buffers)


def second_forward(stage: Stage, kept: Kept, micro_batch: int, draws: Draws) -> Made:
    """Runs the layers as the first forward did.

    Raises:
        RuntimeError: another stage has written over the input meanwhile.
    """
    if _versions(kept.message) != kept.versions:
        raise RuntimeError(
            "a layer behind this stage has written over the stage's input, which its second forward needs: take that "
            "layer's inplace=True away, or plan with recompute='never'"
        )
    if not kept.buffers:
        return stage.forward(kept.message, micro_batch, draws, Turn.SECOND)
    with stage.buffers.replaced(kept.buffers):
        return stage.forward(kept.message, micro_batch, draws, Turn.SECOND)


def _versions(message: Any) -> tuple[int, ...]:
    return tuple(version(tensor) for tensor in tensors(message))
