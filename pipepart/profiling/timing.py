"""Times each layer of a chain on one micro-batch, inside a whole forward and backward as training runs it."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..autograd.split_backward import backward_inputs
from ..data.arguments import call
from .costs import Timing

Layers = Sequence[tuple[str, nn.Module]]
Loss = Callable[[Any], Tensor] | None


@dataclass
class Times:
    """Seconds of each layer, one entry a pass; the loss stands behind the last layer.

    Attributes:
        forward: of every pass.
        whole: of every pass with its backward in one.
        inputs: of the others, the first part of the backward, as for schedules that have one.
        weights: of the second part, with the gradients of the weights that can wait.

    Of the backwards every other is one where no parameter has a gradient yet, as for the first micro-batch of a step;
    behind it comes one where gradients are added up, as for all others.
    """

    forward: list[list[float]] = field(default_factory=list)
    whole: list[list[float]] = field(default_factory=list)
    inputs: list[list[float]] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)


class LayerTimes(NamedTuple):
    """What one layer takes; ``split_seconds`` as in :class:`LayerCost`."""

    forward: Timing
    backward_input: Timing
    backward_weight: Timing
    split_seconds: float


@dataclass
class Step:
    """One layer's forward, waiting for its backward: where gradients enter, and what has come out."""

    roots: tuple[GradientEdge, ...]
    received: list[Tensor | None]


class ChainTimer:
    """Runs a chain layer by layer, each on an autograd graph of its own, and keeps the time.

    A pass goes forward through all layers and the loss and then backward through all of them, so that caches are
    as warm as in training and layers that work in place meet a fresh input. Passes of four kinds take turns: the
    first micro-batch of a step and a later one, with the whole backward and with one in two parts.
    """

    def __init__(self, layers: Layers, loss: Loss, device: torch.device, stop: threading.Event) -> None:
        self.times = Times()
        self._names, self._modules = named_calls(layers, loss)
        self._device = device
        self._stop = stop
        self._engine_seconds = _engine_seconds(device)

    def measure(self, sample: Any, *, budget: float, passes: tuple[int, int]) -> None:
        """Passes of all kinds until ``budget`` seconds are spent, within ``passes`` (least, most) of each."""
        least, most = passes
        self._pass(sample, [])
        self._pass(sample, [], [])
        self._pass(sample, [], [])
        self.times.forward.clear()  # so far it was warm-up
        start = time.perf_counter()
        for count in range(1, most + 1):
            for record in ((self.times.whole,), (self.times.inputs, self.times.weights)):
                self._forget_gradients()
                self._pass(sample, *record)
                self._pass(sample, *record)
            if count >= least and time.perf_counter() - start >= budget:
                break

    def timings(self, micro_batches: int) -> list[LayerTimes]:
        """What each layer takes, and the loss as the last.

        The backward is the mean over the micro-batches of a step, of which the first adds nothing up.
        """
        later = (micro_batches - 1) / micro_batches

        def backward(runs: Sequence[Sequence[float]], index: int) -> list[float]:
            pairs = zip(runs[::2], runs[1::2], strict=True)
            return [one[index] * (1 - later) + other[index] * later for one, other in pairs]

        found = []
        for index, module in enumerate(self._modules):
            forward = [run[index] for run in self.times.forward]
            whole = backward(self.times.whole, index)
            parts = [backward(runs, index) for runs in (self.times.inputs, self.times.weights)]
            trained = isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())
            found.append(
                LayerTimes(_timing(forward), *(_split(whole, *parts) if trained else _unsplit(whole)))
            )
        return found

    def _forget_gradients(self) -> None:
        for module in self._modules:
            if isinstance(module, nn.Module):
                module.zero_grad()

    def _pass(
        self, sample: Any, record: list[list[float]], of_weights: list[list[float]] | None = None
    ) -> None:
        """Forward and backward; the latter in two parts if there is a record for the second."""
        forward = [0.0] * len(self._modules)
        backward = [(0.0, 0.0)] * len(self._modules)
        steps: list[Step] = []
        message = fresh(sample)
        with torch.enable_grad():
            for index in range(len(self._modules)):
                message, step, forward[index] = self._forward(index, message)
                steps.append(step)
            gradients: graph_cut.Gradients = [torch.ones_like(leaf) for leaf in graph_cut.leaves(message)]
            split = of_weights is not None
            for index in reversed(range(len(steps))):
                gradients, backward[index] = self._backward(index, steps.pop(), gradients, split)
        self.times.forward.append(forward)
        record.append([seconds for seconds, _ in backward])
        if of_weights is not None:
            of_weights.append([seconds for _, seconds in backward])

    def _forward(self, index: int, message: Any) -> tuple[Any, Step, float]:
        if self._stop.is_set():
            raise KeyboardInterrupt
        value, received = _entrance(message)
        start = self._now()
        with blaming(self._names[index], "forward"):
            value = call(self._modules[index], value)
        seconds = self._now() - start
        output, roots = graph_cut.cut(value)
        return output, Step(roots, received), seconds

    def _backward(
        self, index: int, step: Step, gradients: graph_cut.Gradients, split: bool
    ) -> tuple[graph_cut.Gradients, tuple[float, float]]:
        """The gradients of the input, and the seconds of both parts; all in the first but with ``split``."""
        if not step.roots:
            return step.received, (0.0, 0.0)
        run = backward_inputs if split else graph_cut.backward
        start = self._now()
        with blaming(self._names[index], "backward"):
            waiting = run(step.roots, gradients)
            first = self._now() - start - self._engine_seconds
            if not waiting:
                return step.received, (max(0.0, first), 0.0)
            start = self._now()
            waiting.accumulate()
            second = self._now() - start - self._engine_seconds
        return step.received, (max(0.0, first), max(0.0, second))

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


def named_calls(layers: Layers, loss: Loss) -> tuple[list[str], list[Callable[[Any], Any]]]:
    """What a pass goes through, the loss last, and what to call each in an error."""
    names = [name for name, _ in layers]
    calls: list[Callable[[Any], Any]] = [module for _, module in layers]
    return (names, calls) if loss is None else ([*names, "loss"], [*calls, loss])


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


def _unsplit(whole: Sequence[float]) -> tuple[Timing, Timing, float]:
    return _timing(whole), Timing(), 0.0


def _split(
    whole: Sequence[float], inputs: Sequence[float], weights: Sequence[float]
) -> tuple[Timing, Timing, float]:
    """The backward's two parts, which sum to its median, and what they take beyond it when each runs by itself.

    Both in the ratios of the fastest passes: the undisturbed ones.
    """
    total = _timing(whole)
    first, second = min(inputs), min(weights)
    if not second:
        return _unsplit(whole)
    share = total.seconds * (first / (first + second))  # which rounding leaves within the total
    fastest = min(whole)
    apart = min(map(sum, zip(inputs, weights, strict=True)))
    return (
        Timing(seconds=share, spread=_timing(inputs).spread),
        Timing(seconds=total.seconds - share, spread=_timing(weights).spread),
        total.seconds * (apart / fastest - 1) if fastest else 0.0,
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


def _entrance(message: Any) -> tuple[Any, list[Tensor | None]]:
    """The message as a layer's input, and the list that will receive its gradients."""
    received: list[Tensor | None] = [None] * len(graph_cut.leaves(message))
    numbers = itertools.count()

    def enter(tensor: Tensor) -> Tensor:
        return _Entrance.apply(tensor, received, next(numbers)) if tensor.requires_grad else tensor

    return pytree.tree_map_only(Tensor, enter, message), received


def _engine_seconds(device: torch.device) -> float:
    """What starting autograd's engine costs by itself: a stage pays it once, a layer timed alone each time."""
    gradient = torch.ones(1, device=device)
    times = []
    for _ in range(30):
        value, received = _entrance(torch.zeros(1, device=device, requires_grad=True))
        start = time.perf_counter()
        graph_cut.backward((get_gradient_edge(value),), (gradient,))
        times.append(time.perf_counter() - start)
        assert received[0] is not None
    return statistics.median(times)
