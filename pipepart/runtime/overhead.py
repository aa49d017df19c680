"""Measures the seconds that the runtime adds to each action, message and step on this machine's CPU.

Two workers train two probe layers with the sequential schedule, in which one worker computes at a time. A probe only
writes 8 MiB, because a real layer also evicts the runtime's data from the caches::

    worker 0   F ──┐                    ┌── B ── F ──┐          B to F on one worker: an action
    worker 1       └── F ── loss ── B ──┘            └── ...    F to F, or B to B: an action and a message
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..cluster import Cluster
from ..data.split import micro_batches_of
from ..loss import Reduction, StepLoss
from ..planning import Plan
from ..planning.plans.stage_plan import StagePlan
from ..profiling import Overhead
from .build import build_stages
from .engine import Engine
from .order import Orders
from .sinks import make_loss_sink

_MICRO_BATCHES = 8
_STEPS = 8
_FLOATS = 2**21  # 8 MiB of float32, more than the caches of one core

Span = tuple[int, str, float, float]  # layer, "F" or "B", start and end in seconds


@cache
def measured_overhead() -> Overhead:
    """Return the overhead of an action, a message and a step; takes about 0.2 s, once per process.

    Measures worker threads only. Actions of torchrun processes take about as long, and
    :meth:`pipepart.Cluster.of_ranks` measures the messages between processes as links.
    """
    with ThreadPoolExecutor(1, "pipepart-overhead") as thread:  # which does not have the caller's torch modes
        return thread.submit(lambda: _overhead(*_measured())).result()


class _Probe(nn.Module):
    """Writes 8 MiB in its forward and in its backward, and appends the span of each to ``spans``."""

    def __init__(self, index: int, spans: list[Span]) -> None:
        super().__init__()
        self._index = index
        self._spans = spans
        self._memory = torch.zeros(_FLOATS)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        self._work("F")
        output = value * self.weight
        output.register_hook(lambda gradient: self._work("B"))
        return output

    def _work(self, kind: str) -> None:
        start = time.perf_counter()
        self._memory.add_(1.0)
        self._spans.append((self._index, kind, start, time.perf_counter()))


def _measured() -> tuple[list[list[Span]], list[float]]:
    """Train two probes; return the spans of each step, sorted by time, and its seconds, without the first step."""
    cluster = Cluster.virtual(2, threads=1)
    stages = tuple(
        StagePlan(layers=(str(index),), device=device.name) for index, device in enumerate(cluster.devices)
    )
    plan = Plan(stages=stages, cluster=cluster, schedule="sequential", micro_batches=_MICRO_BATCHES)
    spans: list[Span] = []
    built = build_stages([(str(index), _Probe(index, spans)) for index in range(2)], plan)
    orders = Orders(plan)
    engine = Engine(plan, built, orders)
    sample = torch.zeros(_MICRO_BATCHES, 1)
    loss = StepLoss(torch.sum, Reduction.SUM)
    steps: list[list[Span]] = []
    seconds: list[float] = []
    try:
        for _ in range(_STEPS):
            begin = time.perf_counter()
            batch = micro_batches_of(sample, None, _MICRO_BATCHES)
            order = orders.step(_MICRO_BATCHES)
            sink = make_loss_sink(loss, batch, order.schedule)
            engine.execute(engine.new_step(order, batch.inputs, sink, seed=0))
            sink.correction()
            seconds.append(time.perf_counter() - begin)
            steps.append(spans.copy())
            spans.clear()
    finally:
        engine.close("the overhead is measured")
        engine.join()
    return steps[1:], seconds[1:]  # the first step also detects buffer writes and random draws


def _overhead(steps: list[list[Span]], seconds: list[float]) -> Overhead:
    """Return the overhead from the gaps between consecutive spans, on one worker and between two workers.

    A step of n actions has n - 1 gaps; the overhead of one action is part of its begin and end. Takes lower quartiles,
    because other programs only make gaps longer.

    Args:
        steps: the spans of each step, sorted by time.
        seconds: of each step, from its call to its return.
    """
    actions: list[float] = []
    messages: list[float] = []
    for spans in steps:
        for (layer, kind, _, end), (next_layer, next_kind, start, _) in pairwise(spans):
            if layer != next_layer:
                messages.append(start - end)
            elif (kind, next_kind) == ("B", "F"):
                actions.append(start - end)
    ends = [whole - (spans[-1][3] - spans[0][2]) for spans, whole in zip(steps, seconds, strict=True)]
    action, action_and_message, end = (
        statistics.quantiles(gaps, n=4)[0] for gaps in (actions, messages, ends)
    )
    return Overhead(
        action_seconds=action,
        message_seconds=max(0.0, action_and_message - action),
        step_seconds=max(0.0, end - action),
    )
