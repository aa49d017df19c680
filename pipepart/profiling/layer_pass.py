"""Runs a chain of layers forward and backward once, layer by layer, and reports each part to an observer.

::

    micro-batch ──▶ layer 0 ──▶ layer 1 ──▶ ... ──▶ loss
                       │           │                  │       one autograd graph a layer,
                    backward ◀── backward ◀── ... ◀── ones    cut off at the layer's input

All forwards run before all backwards, as in training: caches are as warm, and a layer that writes into its input gets
a new one each time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..autograd.split_backward import WeightGradients, backward_inputs
from ..data.arguments import call

Layers = Sequence[tuple[str, nn.Module]]
Loss = Callable[[Any], Tensor] | None


class Observer:
    """Methods that a pass calls before and after each forward and backward. By default they do nothing.

    ``index`` is that of the layer in the chain; the loss comes after the last layer.
    """

    def forward_starts(self, index: int, value: Any) -> None:
        """Called before the forward of a layer on ``value``."""

    def forward_ends(self, index: int, output: Any) -> None:
        """Called after it. Autograd still holds all that the layer saved."""

    def backward_starts(self, index: int) -> None:
        """Called before the backward of a layer. A layer without a backward is left out."""

    def input_gradients_done(self, index: int, deferred: WeightGradients | None) -> None:
        """Called between the two parts of a split backward, and at the end of a whole one with ``deferred`` None."""

    def backward_ends(self, index: int) -> None:
        """Called after the backward of a layer, both parts included."""


class Stopped(Exception):
    """A pass ended early because its ``stop`` event was set."""


@dataclass
class _Step:
    """The forward of one layer: its input, where gradients enter its graph, and the gradients of its input."""

    value: Any
    roots: tuple[GradientEdge, ...]
    received: list[Tensor | None]


class LayerPass:
    """A chain of layers with its loss, to run on one micro-batch as often as needed.

    Args:
        layers: names and modules, in execution order.
        loss: called with the output of the last layer. None: the backward starts with ones at that output.
        stop: a pass ends with :class:`Stopped` before its next forward once this event is set.
    """

    def __init__(self, layers: Layers, loss: Loss, stop: threading.Event | None = None) -> None:
        self.names = [name for name, _ in layers]
        self.calls: list[Callable[..., Any]] = [module for _, module in layers]
        if loss is not None:
            self.names.append("loss")
            self.calls.append(loss)
        self._stop = stop

    def run(self, micro_batch: Any, observer: Observer, *, split: bool = False) -> None:
        """Run all forwards and then all backwards on a copy of ``micro_batch``.

        Gradients are added to the parameters. With ``split`` the backward of each layer runs in two parts, as
        schedules with actions I and W run it.
        """
        steps: list[_Step] = []
        value = fresh(micro_batch)
        with torch.enable_grad():
            for index in range(len(self.calls)):
                value = self._forward(index, value, observer, steps)
            gradients: graph_cut.Gradients = [torch.ones_like(leaf) for leaf in graph_cut.leaves(value)]
            del value
            while steps:
                gradients = self._backward(len(steps) - 1, steps.pop(), gradients, observer, split)

    def _forward(self, index: int, value: Any, observer: Observer, steps: list[_Step]) -> Any:
        """Run the forward of one layer and return its output as a message for the next one."""
        if self._stop is not None and self._stop.is_set():
            raise Stopped
        given, received = entrance(value)
        observer.forward_starts(index, value)
        with _naming(self.names[index], "forward"):
            output = call(self.calls[index], given)
        observer.forward_ends(index, output)
        message, roots = graph_cut.cut(output)
        steps.append(_Step(value, roots, received))
        return message

    def _backward(
        self, index: int, step: _Step, gradients: graph_cut.Gradients, observer: Observer, split: bool
    ) -> graph_cut.Gradients:
        """Run the backward of one layer and return the gradients of its input."""
        if not step.roots:
            return step.received
        with _naming(self.names[index], "backward"):
            observer.backward_starts(index)
            if split:
                deferred = backward_inputs(step.roots, gradients)
                observer.input_gradients_done(index, deferred)
                deferred.accumulate()
            else:
                graph_cut.backward(step.roots, gradients)
                observer.input_gradients_done(index, None)
            observer.backward_ends(index)
        return step.received


def fresh(nest: Any) -> Any:
    """Copy the tensors of a nest, for layers that write into their input."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), nest)


@contextmanager
def _naming(layer: str, part: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"pipepart: in the {part} of layer {layer!r}, while it was profiled")
        raise


class _Entrance(torch.autograd.Function):
    """The start of a layer's graph: stores the gradient of the input without accumulating it, as a stage does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, received: list[Tensor | None], index: int) -> Tensor:
        ctx.received, ctx.index = received, index
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.received[ctx.index] = gradients[0]
        return None, None, None


def entrance(value: Any) -> tuple[Any, list[Tensor | None]]:
    """Return the input for a layer, and a list that receives the gradients of its leaves, in the order of the nest."""
    received: list[Tensor | None] = [None] * len(graph_cut.leaves(value))
    numbers = itertools.count()

    def enter(tensor: Tensor) -> Tensor:
        return _Entrance.apply(tensor, received, next(numbers)) if tensor.requires_grad else tensor

    return pytree.tree_map_only(Tensor, enter, value), received
