"""Converts a plan to ``schedules.StageCosts``: seconds of its devices and links for a simulated step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise

import schedules

from ...cluster import Cluster, Link
from ..partition.reductions import reduce_seconds
from .stage_plan import StagePlan, copy_seconds

Pair = tuple[int, int]  # two stages of a replica that send to each other
Route = Sequence[tuple[Hashable, float]]  # ports, and the bandwidth of a message there in bytes per second


def sending_pairs(stages: Sequence[StagePlan]) -> list[Pair]:
    """Return the pairs of stages of one replica that exchange messages, as (earlier, later)."""
    skips = [(at, skip.target) for at, stage in enumerate(stages) for skip in stage.skips]
    return [*pairwise(range(len(stages))), *skips]


def step_costs(
    stages: Sequence[StagePlan],
    schedule: schedules.Schedule,
    cluster: Cluster,
    devices: Sequence[Sequence[str]],
    scale: Sequence[float] = (),
    shard: bool = False,
) -> schedules.StageCosts:
    """Return the costs of a step for a simulation. All simulations of plans get their costs here.

    Args:
        stages: of all copies of the model that the schedule runs.
        schedule: of all replicas.
        cluster: the devices and links.
        devices: the device of each stage, for each replica of the plan.
        scale: [micro-batches]: seconds relative to the mean, if micro-batches have different sizes.
        shard: whether replicas share the parameters of a stage.
    """
    model = stages[: schedule.model_stages]
    homes = [cluster.device(stage.device) for stage in stages]
    copies = [copy_seconds(stage, home) for stage, home in zip(stages, homes, strict=True)]
    reductions = _reductions(model, devices, schedule, cluster, shard)
    latency, bandwidth, ports = _links(stages, schedule, cluster)

    def with_action(seconds: Iterable[float]) -> list[float]:
        return [each + home.action_seconds for each, home in zip(seconds, homes, strict=True)]

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
        skips=[(at, skip.target, skip.bytes) for at, stage in enumerate(model) for skip in stage.skips],
        host_copy=[beside for beside, _ in copies],
        offload=with_action(busy for _, busy in copies),
        reduce_grad=[seconds for replica in reductions for copy in replica for seconds in copy],
        micro_batch_scale=scale if len(scale) == schedule.micro_batches else (),
    )


def _reductions(
    model: Sequence[StagePlan],
    devices: Sequence[Sequence[str]],
    schedule: schedules.Schedule,
    cluster: Cluster,
    shard: bool,
) -> list[list[list[float]]]:
    """Return [replicas][copies][stages]: seconds of each REDUCE_GRAD."""
    count, home = len(model), schedule.device_of
    stage_on = {row: stage for stage, row in enumerate(home[:count])}
    # A bidirectional schedule runs further copies of the model on the devices of the first.
    copies = [
        [stage_on[row] for row in home[first : first + count]]
        for first in range(0, schedule.stages, count)
        if home[first] in stage_on
    ]
    groups = [[names[stage] for stage in copy] for names in devices for copy in copies]
    rows = reduce_seconds(model, groups, cluster, shard)
    return [rows[first : first + len(copies)] for first in range(0, len(rows), len(copies))]


def _links(
    stages: Sequence[StagePlan],
    schedule: schedules.Schedule,
    cluster: Cluster,
) -> tuple[float | dict[Pair, float], float | dict[Pair, float], dict[Pair, Route]]:
    """Return latency, bandwidth and ports for pairs of schedule rows; single numbers if all links are equal."""
    if not cluster.links_differ:
        return cluster.link.latency, _bandwidth(cluster.link), {}
    latency: dict[Pair, float] = {}
    bandwidth: dict[Pair, float] = {}
    ports: dict[Pair, Route] = {}
    for source, target in _messages(stages, schedule):
        rows = schedule.device_of[source], schedule.device_of[target]
        names = stages[source].device, stages[target].device
        link = cluster.link_between(*names)
        latency[rows], bandwidth[rows] = link.latency, _bandwidth(link)
        if route := cluster.places.route(*names):
            left = link.compress.bytes_left if link.compress else 1.0
            ports[rows] = [(port, rate / left) for port, rate in route]
    return latency, bandwidth, ports


def _bandwidth(link: Link) -> float:
    return 1 / link.seconds_per_byte if link.seconds_per_byte else math.inf


def _messages(stages: Sequence[StagePlan], schedule: schedules.Schedule) -> Iterator[Pair]:
    """Yield (sender, receiver) stages in every copy of the model, each pair in both directions."""
    count = schedule.model_stages
    pairs = sending_pairs(stages[:count])
    for first in range(0, schedule.stages, count):
        for earlier, later in pairs:
            yield first + earlier, first + later
            yield first + later, first + earlier
