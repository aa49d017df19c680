"""The costs of the stages of a plan's replicas on their devices and links, as ``schedules.simulate`` takes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import schedules

from ...cluster import Cluster
from ..partition.reductions import reduce_seconds
from ..partition.replica_classes import Pair, Route, Routes
from .stage_plan import StagePlan, copy_seconds


def sending_pairs(stages: Sequence[StagePlan]) -> list[Pair]:
    """Return the stages of one replica that send to each other, the earlier one first."""
    skips = [(at, skip.target) for at, stage in enumerate(stages) for skip in stage.skips]
    return [*pairwise(range(len(stages))), *skips]


def step_costs(
    stages: Sequence[StagePlan],
    schedule: schedules.Schedule,
    cluster: Cluster,
    reductions: Sequence[Sequence[float]],
    ports: Mapping[Pair, Route],
    scale: Sequence[float] = (),
) -> schedules.StageCosts:
    """Return the costs of a step.

    Args:
        stages: of all copies of the model that the schedule runs.
        schedule: of the step.
        cluster: the devices and links.
        reductions: the seconds of the REDUCE_GRAD of each stage, for each copy.
        ports: from :func:`port_routes`.
        scale: seconds of each micro-batch relative to their mean, if they have different sizes.
    """
    latency: float | dict[Pair, float] = cluster.link.latency
    bandwidth: float | dict[Pair, float] = cluster.link.message_bandwidth or math.inf
    one_copy = stages[: schedule.model_stages]
    copies = [copy_seconds(stage, cluster.device(stage.device)) for stage in stages]
    action = [cluster.device(stage.device).action_seconds for stage in stages]

    def with_action(seconds: Iterable[float]) -> list[float]:
        return [sum(pair) for pair in zip(seconds, action, strict=True)]

    if cluster.links_differ:
        latency, bandwidth = {}, {}
        for rows, names in _rows_and_names(stages, schedule):
            link = cluster.link_between(*names)
            latency[rows], bandwidth[rows] = link.latency, link.message_bandwidth or math.inf
    return schedules.StageCosts(
        forward=with_action(stage.forward_seconds for stage in stages),
        backward_input=with_action(stage.part_seconds[0] for stage in stages),
        backward_weight=with_action(stage.part_seconds[1] for stage in stages),
        backward=with_action(stage.backward_seconds for stage in stages),
        latency=latency,
        bandwidth=bandwidth,
        ports=ports,
        message_bytes=[stage.output_bytes for stage in stages],
        stash_bytes=[stage.stash_bytes for stage in stages],
        weight_stash_bytes=[stage.deferred_bytes for stage in stages],
        boundary_bytes=[stage.boundary_bytes for stage in stages],
        recompute=with_action(stage.recompute_seconds for stage in stages),
        skips=[(at, skip.target, skip.bytes) for at, stage in enumerate(one_copy) for skip in stage.skips],
        host_copy=[beside for beside, _ in copies],
        offload=with_action(busy for _, busy in copies),
        reduce_grad=[seconds for copy in reductions for seconds in copy],
        micro_batch_scale=scale if len(scale) == schedule.micro_batches else (),
    )


def reductions_of(
    stages: Sequence[StagePlan],
    devices: Sequence[Sequence[str]],
    schedule: schedules.Schedule,
    cluster: Cluster,
) -> list[list[list[float]]]:
    """Return the seconds of the REDUCE_GRAD of each stage, for each copy of the model in each replica.

    Args:
        stages: of the first replica.
        devices: the device of each stage, for each replica.
        schedule: of one or more replicas.
        cluster: the devices and links.
    """
    count, home = len(stages), schedule.device_of
    stage_on = {row: stage for stage, row in enumerate(home[:count])}
    # A bidirectional schedule runs further copies of the model on the devices of the first.
    copies = [
        [stage_on[row] for row in home[first : first + count]]
        for first in range(0, schedule.stages, count)
        if home[first] in stage_on
    ]
    rows = reduce_seconds(
        stages, [[own[stage] for stage in copy] for own in devices for copy in copies], cluster
    )
    return [rows[first : first + len(copies)] for first in range(0, len(rows), len(copies))]


def port_routes(
    stages: Sequence[StagePlan], schedule: schedules.Schedule, routes: Routes, replicas: Sequence[int] | None
) -> dict[Pair, Route]:
    """Return the ports between the rows of a schedule, for the replicas that it runs.

    Args:
        stages: of all copies of the model that the schedule runs.
        schedule: of the step.
        routes: of all replicas.
        replicas: that the schedule runs, each with its part of the ports; None for all of them, which share ports.
    """
    found: dict[Pair, Route] = {}
    per_replica = schedule.stages // len(replicas) if replicas else 0
    for one, other in _ways(stages, schedule):
        rows = schedule.device_of[one], schedule.device_of[other]
        if replicas is None:
            route = routes.whole(stages[one].device, stages[other].device)
        else:
            at = one // per_replica
            part = routes.of(replicas[at], stages[one].device, stages[other].device)
            route = [((at, port), rate) for port, rate in part]
        if route:
            found[rows] = route
    return found


def _rows_and_names(
    stages: Sequence[StagePlan], schedule: schedules.Schedule
) -> Iterator[tuple[Pair, tuple[str, str]]]:
    for one, other in _ways(stages, schedule):
        rows = schedule.device_of[one], schedule.device_of[other]
        yield rows, (stages[one].device, stages[other].device)


def _ways(stages: Sequence[StagePlan], schedule: schedules.Schedule) -> Iterator[Pair]:
    """Yield the stages that send to each other, each pair in both directions, in every copy of the model."""
    count = schedule.model_stages
    pairs = sending_pairs(stages[:count])
    for first in range(0, schedule.stages, count):
        for one, other in pairs:
            yield first + one, first + other
            yield first + other, first + one
