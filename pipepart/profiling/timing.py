"""Times the forward and the backward of each layer of a chain on one micro-batch."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..autograd import graph_cut
from ..autograd.split_backward import WeightGradients
from .background_load import BackgroundLoad
from .costs import Timing
from .layer_pass import LayerPass, Observer, entrance

Seconds = NDArray[np.float64]

PASSES = (3, 50)  # minimum and maximum number of passes of each kind
_LONGEST = 2.0  # longest time that counts, in medians


class LayerTimes(NamedTuple):
    """Times of one layer, with the field names of :class:`LayerCost`."""

    forward: Timing = Timing()
    backward_input: Timing = Timing()
    backward_weight: Timing = Timing()
    split_seconds: float | None = None
    slowdown: float = 1.0

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward.seconds + self.backward_input.seconds + self.backward_weight.seconds

    def slower_by(self, beside: LayerTimes) -> LayerTimes:
        """Return these times with ``slowdown`` set to ``beside`` over them, at least 0.1; 1 if they are 0.

        Args:
            beside: the times of the same layer while other devices compute.
        """
        return self._replace(slowdown=max(beside.seconds / self.seconds, 0.1) if self.seconds else 1.0)


class LayerTimer:
    """Runs passes over a chain and records the seconds of each layer.

    Four kinds of passes alternate: a whole or a split backward, each for the first micro-batch of a step, whose
    parameters have no gradients yet, and for a later micro-batch, which adds to gradients. They run alone and beside a
    load in turns: the pace of a machine changes within seconds, and so would the ratio of a time now to one then.

    Args:
        chain: the layers.
        device: on which they run.
        load: trains copies of them meanwhile, every other turn; None: they always run alone.
    """

    def __init__(self, chain: LayerPass, device: torch.device, load: BackgroundLoad | None = None) -> None:
        self._chain = chain
        self._clock = _HostClock() if device.type == "cpu" else _EventClock(device)
        self._load = load
        self._alone, self._beside = _Samples(), _Samples()

    @property
    def repeats(self) -> int:
        """Number of timed passes without load."""
        return len(self._alone.forward)

    def measure(self, micro_batch: Any, budget: float) -> None:
        """Run passes for ``budget`` seconds, but at least 3 and at most 50 of each kind."""
        minimum, maximum = PASSES
        for split in (False, True):  # warm-up
            self._chain.run(micro_batch, Observer(), split=split)
        start = time.perf_counter()
        for count in range(1, maximum + 1):
            self._turn(micro_batch, self._alone)
            if self._load is not None:
                with self._load.running():
                    self._turn(micro_batch, self._beside)
            if count >= minimum and time.perf_counter() - start >= budget:
                break

    def timings(self, micro_batches: int) -> list[LayerTimes]:
        """Return the times of each layer, then of the loss if there is one.

        The time of a backward is the mean over the ``micro_batches`` of a step. The first of them adds to no gradients.
        """
        alone = self._alone.timings(self._chain.calls, micro_batches)
        if self._load is None:
            return alone
        beside = self._beside.timings(self._chain.calls, micro_batches)
        return [times.slower_by(loaded) for times, loaded in zip(alone, beside, strict=True)]

    def _turn(self, micro_batch: Any, samples: _Samples) -> None:
        """Time each of the four kinds of passes once."""
        for split in (False, True):
            self._chain.zero_grad()
            self._time(micro_batch, split, samples)
            self._time(micro_batch, split, samples)

    def _time(self, micro_batch: Any, split: bool, samples: _Samples) -> None:
        marks = _Marks(self._clock)
        self._chain.run(micro_batch, marks, split=split)
        self._clock.wait()
        layers, engine = len(self._chain.calls), self._clock.engine_seconds
        samples.forward.append(marks.seconds("forward", "output", layers))
        backward = marks.seconds("backward", "middle", layers, engine)
        (samples.input if split else samples.whole).append(backward)
        if split:
            samples.weight.append(marks.seconds("deferred", "end", layers, engine))


@dataclass
class _Samples:
    """Seconds, [passes][layers], of the forward, the whole backward, and both parts of the split backward."""

    forward: list[list[float]] = field(default_factory=list)
    whole: list[list[float]] = field(default_factory=list)
    input: list[list[float]] = field(default_factory=list)
    weight: list[list[float]] = field(default_factory=list)

    def timings(self, calls: Sequence[Callable[..., Any]], micro_batches: int) -> list[LayerTimes]:
        """Return the times of each of the layers."""

        def backward(samples: list[list[float]]) -> Seconds:
            first, later = np.array(samples[::2]), np.array(samples[1::2])
            return (first + (micro_batches - 1) * later) / micro_batches

        forward, whole = np.array(self.forward), backward(self.whole)
        inputs, weights = backward(self.input), backward(self.weight)
        times: list[LayerTimes] = []
        for index, module in enumerate(calls):
            parts = _timing(whole[:, index]), Timing(), 0.0
            if isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters()):
                parts = _split(whole[:, index], inputs[:, index], weights[:, index])
            times.append(LayerTimes(_timing(forward[:, index]), *parts))
        return times


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
    """Records events on the current stream of an accelerator. The host waits once per pass, not once per layer."""

    engine_seconds = 0.0  # the device does not wait for the host while its queue is not empty

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


class _Marks(Observer):
    """Reads a clock at the start and the end of each part of one pass, for each layer."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._at: dict[str, dict[int, Any]] = defaultdict(dict)

    def forward_starts(self, index: int, value: Any) -> None:
        self._at["forward"][index] = self._clock.now()

    def forward_ends(self, index: int, output: Any) -> None:
        self._at["output"][index] = self._clock.now()

    def backward_starts(self, index: int, gradients: graph_cut.Gradients) -> None:
        self._at["backward"][index] = self._clock.now()

    def input_gradients_done(self, index: int, deferred: WeightGradients | None) -> None:
        self._at["middle"][index] = self._clock.now()
        if deferred:
            self._at["deferred"][index] = self._at["middle"][index]

    def backward_ends(self, index: int) -> None:
        self._at["end"][index] = self._clock.now()

    def seconds(self, start: str, end: str, layers: int, overhead: float = 0.0) -> list[float]:
        """Return the seconds of each layer from mark ``start`` to mark ``end`` less ``overhead``; 0 without marks."""
        starts, ends = self._at[start], self._at[end]
        return [
            max(0.0, self._clock.seconds(starts[index], ends[index]) - overhead) if index in starts else 0.0
            for index in range(layers)
        ]


def _timing(seconds: Seconds) -> Timing:
    """Return the mean, where no time counts as more than twice the median, and the spread.

    A mean, because a step is a sum of many such times and means add up. The median of a skewed time is too low, and
    more so the mean of the faster ones: there may be as few as three. The limit is for a pause of the machine.
    """
    first, median, third = np.quantile(seconds, (0.25, 0.5, 0.75))
    mean = np.minimum(seconds, _LONGEST * median).mean()
    return Timing(seconds=mean, spread=(third - first) / 2)


def _split(whole: Seconds, inputs: Seconds, weights: Seconds) -> tuple[Timing, Timing, float]:
    """Return the times of both parts of a backward, and the extra seconds when the parts run separately.

    Both times sum to the time of the whole backward. Their ratio is that of the fastest passes, which other programs
    disturbed least.
    """
    total, first, second, fastest = _timing(whole), inputs.min(), weights.min(), whole.min()
    if not second:
        return total, Timing(), 0.0
    share = total.seconds * (first / (first + second))  # in this order rounding leaves it within the total
    return (
        Timing(seconds=share, spread=_timing(inputs).spread),
        Timing(seconds=total.seconds - share, spread=_timing(weights).spread),
        total.seconds * ((inputs + weights).min() / fastest - 1) if fastest else 0.0,
    )


def _engine_seconds() -> float:
    """Return the seconds to start autograd's engine on the CPU. A stage starts it once, the timer once per layer."""
    gradient = torch.ones(1)
    times = []
    for _ in range(30):
        value, received = entrance(torch.zeros(1, requires_grad=True))
        start = time.perf_counter()
        graph_cut.backward((get_gradient_edge(value),), (gradient,))
        times.append(time.perf_counter() - start)
        assert received[0] is not None
    return statistics.median(times)
