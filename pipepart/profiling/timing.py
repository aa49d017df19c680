"""Times the forward and the backward of each layer of a chain on one micro-batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..autograd import graph_cut
from ..autograd.split_backward import WeightGradients
from .costs import Timing
from .layer_pass import LayerPass, Observer, entrance


class LayerTimes(NamedTuple):
    """Times of one layer, with the field names of :class:`LayerCost`."""

    forward: Timing = Timing()
    backward_input: Timing = Timing()
    backward_weight: Timing = Timing()
    split_seconds: float | None = None


class LayerTimer:
    """Runs passes over a chain and keeps the seconds of each layer.

    Four kinds of passes alternate: with a whole or a split backward, for the first micro-batch of a step (no gradients
    yet) or a later one (which adds to gradients).

    Attributes:
        repeats: how many passes were timed.
    """

    def __init__(self, chain: LayerPass, device: torch.device) -> None:
        self.repeats = 0
        self._chain = chain
        self._clock = _HostClock() if device.type == "cpu" else _EventClock(device)
        self._forward: list[list[float]] = []
        # Seconds of each layer, a row a pass. Passes of first and of later micro-batches take turns.
        self._whole: list[list[float]] = []
        self._input: list[list[float]] = []
        self._weight: list[list[float]] = []

    def measure(self, micro_batch: Any, *, budget: float, passes: tuple[int, int]) -> None:
        """Run passes of all kinds for ``budget`` seconds, but of each kind within ``passes`` (least, most)."""
        least, most = passes
        for split in (False, True):  # warm-up
            self._chain.run(micro_batch, Observer(), split=split)
        start = time.perf_counter()
        for count in range(1, most + 1):
            for split in (False, True):
                self._forget_gradients()
                self._time(micro_batch, split)
                self._time(micro_batch, split)
            if count >= least and time.perf_counter() - start >= budget:
                break

    def timings(self, micro_batches: int) -> list[LayerTimes]:
        """The times of each layer, and of the loss as the last if there is one.

        A backward counts as the mean over the ``micro_batches`` of a step, of which the first adds to no gradients.
        """
        later = (micro_batches - 1) / micro_batches

        def backward(passes: Sequence[Sequence[float]], index: int) -> list[float]:
            pairs = zip(passes[::2], passes[1::2], strict=True)
            return [first[index] * (1 - later) + other[index] * later for first, other in pairs]

        found = []
        for index, module in enumerate(self._chain.calls):
            forward = _timing([one[index] for one in self._forward])
            whole, first, second = (
                backward(passes, index) for passes in (self._whole, self._input, self._weight)
            )
            trained = isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())
            found.append(LayerTimes(forward, *(_split(whole, first, second) if trained else _unsplit(whole))))
        return found

    def _forget_gradients(self) -> None:
        for module in self._chain.calls:
            if isinstance(module, nn.Module):
                module.zero_grad()

    def _time(self, micro_batch: Any, split: bool) -> None:
        observer = _PassTimes(self._clock, len(self._chain.calls))
        self._chain.run(micro_batch, observer, split=split)
        self._clock.wait()
        self.repeats += 1
        self._forward.append(observer.forward())
        if split:
            self._input.append(observer.input_gradients())
            self._weight.append(observer.weight_gradients())
        else:
            self._whole.append(observer.input_gradients())


class _HostClock:
    """Reads the host's clock, for layers on the CPU."""

    def __init__(self) -> None:
        self.engine_seconds = _engine_seconds()

    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _EventClock:
    """Records events on the current stream of an accelerator, so that the host waits once a pass, not once a layer."""

    engine_seconds = 0.0  # the host's work, which the device does not wait for while its queue is not empty

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def wait(self) -> None:
        torch.accelerator.synchronize(self._device)

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        return start.elapsed_time(end) / 1e3


class _PassTimes(Observer):
    """Marks of a clock at the start and the end of each part of one pass."""

    def __init__(self, clock: Any, layers: int) -> None:
        self._clock = clock
        self._layers = layers
        self._marks: dict[tuple[str, int], Any] = {}

    def forward_starts(self, index: int, value: Any) -> None:
        self._marks["forward", index] = self._clock.now()

    def forward_ends(self, index: int, output: Any) -> None:
        self._marks["output", index] = self._clock.now()

    def backward_starts(self, index: int) -> None:
        self._marks["backward", index] = self._clock.now()

    def input_gradients_done(self, index: int, deferred: WeightGradients | None) -> None:
        self._marks["middle", index] = self._clock.now()
        if deferred:
            self._marks["deferred", index] = self._marks["middle", index]

    def backward_ends(self, index: int) -> None:
        self._marks["end", index] = self._clock.now()

    def forward(self) -> list[float]:
        """Seconds of each forward."""
        return self._between("forward", "output", 0.0)

    def input_gradients(self) -> list[float]:
        """Seconds of each whole backward, or of the first part of it."""
        return self._between("backward", "middle", self._clock.engine_seconds)

    def weight_gradients(self) -> list[float]:
        """Seconds of the second part of each backward."""
        return self._between("deferred", "end", self._clock.engine_seconds)

    def _between(self, start: str, end: str, overhead: float) -> list[float]:
        """Seconds from one mark to another, less ``overhead``; 0 for layers that have no such marks."""
        return [
            max(0.0, self._clock.seconds(self._marks[start, index], self._marks[end, index]) - overhead)
            if (start, index) in self._marks
            else 0.0
            for index in range(self._layers)
        ]


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
    """The two parts of a backward, whose sum is the median of the whole, and their overhead when run separately.

    The ratios come from the fastest passes, which were disturbed least.
    """
    total = _timing(whole)
    first, second = min(inputs), min(weights)
    if not second:
        return _unsplit(whole)
    share = total.seconds * (first / (first + second))  # in this order rounding leaves it within the total
    fastest = min(whole)
    apart = min(map(sum, zip(inputs, weights, strict=True)))
    return (
        Timing(seconds=share, spread=_timing(inputs).spread),
        Timing(seconds=total.seconds - share, spread=_timing(weights).spread),
        total.seconds * (apart / fastest - 1) if fastest else 0.0,
    )


def _engine_seconds() -> float:
    """Seconds to start autograd's engine on the CPU: a stage pays them once, a layer that is timed alone each time."""
    gradient = torch.ones(1)
    times = []
    for _ in range(30):
        value, received = entrance(torch.zeros(1, requires_grad=True))
        start = time.perf_counter()
        graph_cut.backward((get_gradient_edge(value),), (gradient,))
        times.append(time.perf_counter() - start)
        assert received[0] is not None
    return statistics.median(times)
