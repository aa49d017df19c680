"""Times each layer of a chain on one micro-batch, inside a whole forward and backward as training runs it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from .. import boundary
from .profile import Timing

Layers = Sequence[tuple[str, nn.Module]]
Loss = Callable[[Any], Tensor] | None


@dataclass
class Times:
    """Seconds of each layer, one entry a pass; the loss stands behind the last layer.

    Attributes:
        forward: of every pass.
        first_backward: where no parameter has a gradient yet, as for the first micro-batch of a step.
        later_backward: where gradients are added up, as for all others.
        backward_input: of the gradients of the inputs alone.
    """

    forward: list[list[float]] = field(default_factory=list)
    first_backward: list[list[float]] = field(default_factory=list)
    later_backward: list[list[float]] = field(default_factory=list)
    backward_input: list[list[float]] = field(default_factory=list)


@dataclass
class Step:
    """One layer's forward, waiting for its backward: where gradients leave, where they enter, what has come out."""

    inputs: tuple[GradientEdge, ...]
    roots: tuple[GradientEdge, ...]
    received: list[Tensor | None]


class ChainTimer:
    """Runs a chain layer by layer, each on an autograd graph of its own, and keeps the time.

    A pass goes forward through all layers and the loss and then backward through all of them, so that caches are
    as warm as in training and layers that work in place meet a fresh input. Passes of three kinds take turns: the
    whole backward of the first micro-batch of a step, that of a later one, and the gradients of the inputs alone;
    what these lack is the weights' part.
    """

    def __init__(self, layers: Layers, loss: Loss, device: torch.device, stop: threading.Event) -> None:
        self.times = Times()
        self._modules: list[Callable[[Any], Any]] = [module for _, module in layers]
        self._names = [name for name, _ in layers]
        if loss is not None:
            self._modules.append(loss)
            self._names.append("loss")
        self._device = device
        self._stop = stop
        self._engine_seconds = _engine_seconds(device)

    def measure(self, sample: Any, *, budget: float, passes: tuple[int, int]) -> None:
        """Passes of all kinds until ``budget`` seconds are spent, within ``passes`` (least, most) of each."""
        least, most = passes
        self._pass(sample, [])
        self._pass(sample, [], inputs_only=True)
        self.times.forward.clear()  # so far it was warm-up
        start = time.perf_counter()
        for count in range(1, most + 1):
            self._forget_gradients()
            self._pass(sample, self.times.first_backward)
            self._pass(sample, self.times.later_backward)
            self._pass(sample, self.times.backward_input, inputs_only=True)
            if count >= least and time.perf_counter() - start >= budget:
                break

    def timings(self, micro_batches: int) -> list[tuple[Timing, Timing, Timing]]:
        """Forward, backward for inputs and backward for weights of each layer, and of the loss as the last.

        The backward is the mean over the micro-batches of a step, of which the first adds nothing up.
        """
        found = []
        for index, module in enumerate(self._modules):
            forward = [run[index] for run in self.times.forward]
            pairs = zip(self.times.first_backward, self.times.later_backward, strict=True)
            whole = [(a[index] + (micro_batches - 1) * b[index]) / micro_batches for a, b in pairs]
            inputs = [run[index] for run in self.times.backward_input]
            trained = isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())
            parts = _split(whole, inputs) if trained else (_timing(whole), Timing())
            found.append((_timing(forward), *parts))
        return found

    def _forget_gradients(self) -> None:
        for module in self._modules:
            if isinstance(module, nn.Module):
                module.zero_grad()

    def _pass(self, sample: Any, record: list[list[float]], *, inputs_only: bool = False) -> None:
        forward = [0.0] * len(self._modules)
        backward = [0.0] * len(self._modules)
        steps: list[Step] = []
        message = fresh(sample)
        with torch.enable_grad():
            for index in range(len(self._modules)):
                message, step, forward[index] = self._forward(index, message)
                steps.append(step)
            gradients: boundary.Gradients = [torch.ones_like(leaf) for leaf in boundary.leaves(message)]
            for index in reversed(range(len(steps))):
                gradients, backward[index] = self._backward(index, steps.pop(), gradients, inputs_only)
        self.times.forward.append(forward)
        record.append(backward)

    def _forward(self, index: int, message: Any) -> tuple[Any, Step, float]:
        if self._stop.is_set():
            raise KeyboardInterrupt
        value, inputs, received = _entrance(message)
        start = self._now()
        with blaming(self._names[index], "forward"):
            value = self._modules[index](value)
        seconds = self._now() - start
        output, roots = boundary.cut(value)
        return output, Step(inputs, roots, received), seconds

    def _backward(
        self, index: int, step: Step, gradients: boundary.Gradients, inputs_only: bool
    ) -> tuple[boundary.Gradients, float]:
        if not step.roots or (inputs_only and not step.inputs):
            return step.received, 0.0
        start = self._now()
        with blaming(self._names[index], "backward"):
            if inputs_only:
                found = boundary.input_gradients(step.roots, gradients, step.inputs)
            else:
                boundary.backward(step.roots, gradients)
                found = step.received
        seconds = self._now() - start
        return found, max(0.0, seconds - self._engine_seconds)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@contextmanager
def blaming(layer: str, what: str) -> Iterator[None]:
    """An exception from the block gets a note that names the layer."""
    try:
        yield
    except Exception as error:
        error.add_note(f"pipepart: in the {what} of layer {layer!r}, while it was profiled")
        raise


def fresh(sample: Any) -> Any:
    """A copy of a nest of tensors, for layers that write into their input."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), sample)


def _timing(seconds: Sequence[float]) -> Timing:
    if len(seconds) < 2:
        return Timing(seconds=statistics.median(seconds or [0.0]))
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(seconds=quartiles[1], spread=(quartiles[2] - quartiles[0]) / 2)


def _split(whole: Sequence[float], inputs: Sequence[float]) -> tuple[Timing, Timing]:
    """The backward's two parts, which sum to its median, in the ratio of the fastest passes: the undisturbed ones."""
    total, part = _timing(whole), _timing(inputs)
    share = total.seconds * min(1.0, min(inputs) / min(whole)) if min(whole) else 0.0
    return (
        Timing(seconds=share, spread=part.spread),
        Timing(seconds=total.seconds - share, spread=total.spread + part.spread if share else total.spread),
    )


class _Entrance(torch.autograd.Function):
    """Where a layer's graph begins: takes the input's gradient and, as inside a stage, does not add it up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, received: list[Tensor | None], index: int) -> Tensor:
        ctx.received, ctx.index = received, index
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.received[ctx.index] = gradients[0]
        return None, None, None


def _entrance(message: Any) -> tuple[Any, tuple[GradientEdge, ...], list[Tensor | None]]:
    """The message as a layer's input, the edges of its gradients, and the list that will receive them."""
    received: list[Tensor | None] = [None] * len(boundary.leaves(message))
    edges: list[GradientEdge] = []

    def enter(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        value = _Entrance.apply(tensor, received, len(edges))
        edges.append(get_gradient_edge(value))
        return value

    return pytree.tree_map_only(Tensor, enter, message), tuple(edges), received


def _engine_seconds(device: torch.device) -> float:
    """What starting autograd's engine costs by itself: a stage pays it once, a layer timed alone each time."""
    gradient = torch.ones(1, device=device)
    times = []
    for _ in range(30):
        value, _, received = _entrance(torch.zeros(1, device=device, requires_grad=True))
        start = time.perf_counter()
        boundary.backward((get_gradient_edge(value),), (gradient,))
        times.append(time.perf_counter() - start)
        assert received[0] is not None
    return statistics.median(times)
