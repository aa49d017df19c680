"""Runs a chain of layers forward and backward once, layer by layer, and reports each part to an observer.

::

    micro-batch ──▶ layer 0 ──▶ layer 1 ──▶ ... ──▶ loss
                       │           │                  │       one autograd graph per layer,
                    backward ◀── backward ◀── ... ◀── ones    cut off at the layer's input

All forwards run before all backwards, as in training, so CPU caches are as warm as in training. A layer that writes
into its input gets a new copy in each pass.
"""

from __future__ import annotations

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
from ..autograd.own_copy import own_copy
from ..autograd.split_backward import WeightGradients, backward_inputs
from ..capture import copied, values_refused
from ..data.arguments import call

Layers = Sequence[tuple[str, nn.Module]]
Loss = Callable[[Any], Tensor] | None


class Observer:
    """Callbacks of a pass, before and after the forward and backward of each layer. By default they do nothing.

    ``index`` is the position of the layer in the chain. The index of the loss is the number of layers.
    """

    def forward_starts(self, index: int, value: Any) -> None:
        """Called before the forward of a layer on ``value``."""

    def forward_ends(self, index: int, output: Any) -> None:
        """Called after the forward of a layer, while autograd still holds the tensors that the layer saved."""

    def backward_starts(self, index: int, gradients: graph_cut.Gradients) -> None:
        """Called before the backward of a layer on the gradients of its output. Skipped if it has no backward."""

    def input_gradients_done(self, index: int, deferred: WeightGradients | None) -> None:
        """Called between the parts of a split backward; at the end of a whole backward, with ``deferred`` None."""

    def backward_ends(self, index: int) -> None:
        """Called after the backward of a layer, after both parts if it is split."""


class Stopped(Exception):
    """A pass ended early because its ``stop`` event was set."""


@dataclass
class _Step:
    """State of one layer from forward to backward: its input, its graph's roots, and a list for input gradients."""

    value: Any
    roots: tuple[GradientEdge, ...]
    received: list[Tensor | None]


class LayerPass:
    """A chain of layers with its loss, to run on one micro-batch as often as needed.

    Args:
        layers: names and modules, in execution order.
        loss: called with the output of the last layer. None: the backward starts with ones at that output.
        stop: once this event is set, a pass raises :class:`Stopped` before its next forward.

    Attributes:
        names: names of all layers, then ``"loss"`` if there is a loss.
        calls: the modules of all layers, then the loss.
    """

    def __init__(self, layers: Layers, loss: Loss, stop: threading.Event | None = None) -> None:
        self.names = [name for name, _ in layers]
        self.calls: list[Callable[..., Any]] = [module for _, module in layers]
        if loss is not None:
            self.names.append("loss")
            self.calls.append(loss)
        self._stop = stop

    def zero_grad(self) -> None:
        """Clear the gradients of the layers and of the loss."""
        for module in self.calls:
            if isinstance(module, nn.Module):
                module.zero_grad()

    def run(self, micro_batch: Any, observer: Observer, *, split: bool = False) -> None:
        """Run all forwards and then all backwards on a copy of ``micro_batch``.

        Gradients are added to those of the parameters. With ``split``, the backward of each layer runs in two parts,
        as the actions I and W of a schedule.
        """
        steps: list[_Step] = []
        value = own_copy(micro_batch)
        with torch.enable_grad():
            for index in range(len(self.calls)):
                value, step = self._forward(index, value, observer)
                steps.append(step)
                del step
            gradients: graph_cut.Gradients = [torch.ones_like(leaf) for leaf in graph_cut.leaves(value)]
            del value
            for index in reversed(range(len(self.calls))):
                gradients = self._backward(index, steps.pop(), gradients, observer, split)

    def output(self, micro_batch: Any) -> Any:
        """Run only the forwards and return the output as a message."""
        value = own_copy(micro_batch)
        with torch.enable_grad():
            for index in range(len(self.calls)):
                value, _ = self._forward(index, value, Observer())
        return value

    def _forward(self, index: int, value: Any, observer: Observer) -> tuple[Any, _Step]:
        """Run the forward of one layer. Return its output as a message, and the state for its backward."""
        if self._stop is not None and self._stop.is_set():
            raise Stopped
        entered, received = entrance(value)
        observer.forward_starts(index, value)
        with _naming(self.names[index], "forward"):
            output = call(self.calls[index], entered)
        observer.forward_ends(index, output)
        message, roots = graph_cut.cut(output)
        return message, _Step(value, roots, received)

    def _backward(
        self, index: int, step: _Step, gradients: graph_cut.Gradients, observer: Observer, split: bool
    ) -> graph_cut.Gradients:
        """Run the backward of one layer and return the gradients of its input."""
        if not step.roots:
            return step.received
        with _naming(self.names[index], "backward"):
            observer.backward_starts(index, gradients)
            if split:
                deferred = backward_inputs(step.roots, gradients)
                observer.input_gradients_done(index, deferred)
                deferred.accumulate()
            else:
                graph_cut.backward(step.roots, gradients)
                observer.input_gradients_done(index, None)
            observer.backward_ends(index)
        return step.received


def fresh(nest: Any, device: torch.device | None = None) -> Any:
    """Return a nest with copies of its tensors that do not require gradients.

    Args:
        nest: any nest of tensors.
        device: the device of the copies, as for :func:`pipepart.capture.copied`.
    """
    return pytree.tree_map_only(Tensor, lambda t: copied(t, device), nest)


@contextmanager
def _naming(layer: str, part: str) -> Iterator[None]:
    try:
        with values_refused(layer):
            yield
    except Exception as error:
        error.add_note(f"pipepart: in the {part} of layer {layer!r}, while it was profiled")
        raise


def entrance(value: Any) -> tuple[Any, list[Tensor | None]]:
    """Return the input for a layer, and a list that its backward fills with the gradients of the input's leaves."""
    received: list[Tensor | None] = [None] * len(graph_cut.leaves(value))
    return graph_cut.catching(value, received), received
