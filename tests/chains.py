"""Pipelines cut by hand at given layers, so that a test chooses every border."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from pipepart import Cluster, Pipeline, Plan
from pipepart.capture import flatten
from pipepart.planning import StagePlan


def plan_by_hand(
    names: Sequence[str], borders: Sequence[int], *, micro_batches: int, schedule: str = "1f1b"
) -> Plan:
    """A plan with a stage between each two borders, each on a virtual device of one thread."""
    cluster = Cluster.virtual(len(borders) + 1, threads=1)
    edges = [0, *borders, len(names)]
    return Plan(
        stages=tuple(
            StagePlan(layers=tuple(names[start:end]), device=device.name)
            for start, end, device in zip(edges, edges[1:], cluster.devices, strict=False)
        ),
        cluster=cluster,
        schedule=schedule,
        micro_batches=micro_batches,
    )


def cut_by_hand(
    model: nn.Module,
    borders: Sequence[int],
    *,
    loss_fn: Any = None,
    micro_batches: int = 3,
    schedule: str = "1f1b",
    trace: bool = False,
    reduction: Literal["mean", "sum"] | None = None,
) -> Pipeline:
    """The model as a pipeline whose stages begin at layer 0 and at each of ``borders``."""
    names = [name for name, _ in flatten(model)]
    plan = plan_by_hand(names, borders, micro_batches=micro_batches, schedule=schedule)
    return Pipeline(model, plan, loss_fn=loss_fn, reduction=reduction, trace=trace)
