"""Measures the seconds that the runtime adds to each action and each message, on the CPU of this machine.

Two layers that do nothing but write 8 MiB, as a real layer pushes the runtime out of the caches, are trained by two
workers under the sequential schedule, in which one worker computes at a time::

    worker 0   F ──┐                    ┌── B ── F ──┐          B to F on one worker: an action
    worker 1       └── F ── loss ── B ──┘            └── ...    F to F, or B to B: an action and a message
"""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import Future
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
from .observe.trace import Traces
from .order import Orders
from .sinks import make_loss_sink
from .state.batch_norm import DeferredBatchNorm

_MICRO_BATCHES = 8
_STEPS = 8
_FLOATS = 2**21  # 8 MiB, more than the caches of one core

Span = tuple[int, str, float, float]  # layer, "F" or "B", start and end


@cache
def measured_overhead() -> Overhead:
    """Return the seconds of an action and of a message; takes about 0.2 s once a process.

    Processes under torchrun are not measured: their actions take about as long as those of threads, and their messages
    are measured as links, by :meth:`pipepart.Cluster.of_ranks`.
    """
    found: Future[Overhead] = Future()

    def run() -> None:  # on a thread of its own, without the caller's modes of torch
        try:
            found.set_result(_overhead(_spans()))
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run, name="pipepart-overhead", daemon=True)
    thread.start()
    return found.result()


class _Probe(nn.Module):
    """Writes 8 MiB in its forward and in its backward, and notes when."""

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


def _spans() -> list[list[Span]]:
    """Train two probes and return what they noted in each step, in the order of time."""
    cluster = Cluster.virtual(2, threads=1)
    stages = tuple(StagePlan(layers=(str(at),), device=one.name) for at, one in enumerate(cluster.devices))
    plan = Plan(stages=stages, cluster=cluster, schedule="sequential", micro_batches=_MICRO_BATCHES)
    spans: list[Span] = []
    built = build_stages([(str(at), _Probe(at, spans)) for at in range(2)], plan)
    orders = Orders(plan)
    engine = Engine(plan, built, orders, Traces(plan, always=False), DeferredBatchNorm((), built))
    batch = micro_batches_of(torch.zeros(_MICRO_BATCHES, 1), None, _MICRO_BATCHES)
    loss = StepLoss(torch.sum, Reduction.SUM)
    steps: list[list[Span]] = []
    try:
        for _ in range(_STEPS):
            order = orders.step(_MICRO_BATCHES)
            sink = make_loss_sink(loss, batch, order.schedule)
            engine.execute(engine.new_step(order, batch.inputs, sink, seed=0))
            steps.append(spans.copy())
            spans.clear()
    finally:
        engine.close("the overhead is measured")
        engine.join()
    return steps[1:]  # the first step finds out what layers write and draw


def _overhead(steps: list[list[Span]]) -> Overhead:
    """Return the usual gaps between spans: on one worker without a message, and between two workers.

    A quarter of the gaps is shorter: other programs make some longer, and none shorter.
    """
    actions: list[float] = []
    messages: list[float] = []
    for spans in steps:
        for (layer, kind, _, end), (other, other_kind, start, _) in pairwise(spans):
            if layer != other:
                messages.append(start - end)
            elif (kind, other_kind) == ("B", "F"):
                actions.append(start - end)
    action, both = (statistics.quantiles(gaps, n=4)[0] for gaps in (actions, messages))
    return Overhead(action_seconds=action, message_seconds=max(0.0, both - action))
