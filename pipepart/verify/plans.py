"""The plans that a check tries: the layers shared out evenly, for nothing hangs on the best cut."""

from __future__ import annotations

from collections.abc import Sequence

import schedules

from ..cluster import Cluster
from ..planning import Plan, StagePlan
from ..planning.search.candidate import CHUNKS
from ..planning.stage_plan import Recompute


def even_plan(
    names: Sequence[str], cluster: Cluster, schedule: str, micro_batches: int, recompute: Recompute
) -> Plan:
    """A plan with as many stages as the schedule wants, each of as many layers, up to one.

    Raises:
        ValueError: there is no schedule of that name, it changes the weights within a step, or there are fewer layers
            than stages.
    """
    if schedule not in schedules.names():
        raise ValueError(f"no schedule is called {schedule!r}: choose among {', '.join(schedules.names())}")
    chunks = CHUNKS.get(schedule) or 1
    built = schedules.build(schedule, devices=len(cluster), micro_batches=micro_batches, chunks=chunks)
    if built.versions:
        raise ValueError(
            f"schedule {schedule!r} changes the weights within a step, on purpose: choose another"
        )
    stages = built.model_stages
    if len(names) < stages:
        raise ValueError(
            f"schedule {schedule!r} on {len(cluster)} devices has {stages} stages, the model {len(names)} layers: "
            "take fewer devices or another schedule"
        )
    edges = [len(names) * index // stages for index in range(stages + 1)]
    return Plan(
        stages=tuple(
            StagePlan(layers=tuple(names[start:end]), device=cluster.devices[home].name, recompute=recompute)
            for start, end, home in zip(edges, edges[1:], built.device_of, strict=False)
        ),
        cluster=cluster,
        schedule=schedule,
        micro_batches=micro_batches,
        chunks=chunks,
    )


def forwards(plan: Plan, micro_batches: int) -> list[list[int]]:
    """For each layer the micro-batches in the order in which it runs them; twice those that it runs a second time.

    Of a plan with several copies of the model nothing: the layers of the first run some of the micro-batches only.
    """
    if plan.build_schedule(micro_batches).replicas > 1:
        return [[] for stage in plan.stages for _ in stage.layers]
    order = _order(plan, micro_batches, {schedules.Kind.F, schedules.Kind.RECOMPUTE})
    return [order[index] for index, stage in enumerate(plan.stages) for _ in stage.layers]


def summing_order(plan: Plan, micro_batches: int) -> list[int]:
    """The order in which the first stage that does not keep to that of the micro-batches adds up their gradients."""
    own = list(range(micro_batches))
    if plan.build_schedule(micro_batches).replicas > 1:
        return own
    kinds = {schedules.Kind.B, schedules.Kind.W}
    return next((order for order in _order(plan, micro_batches, kinds) if order != own), own)


def _order(plan: Plan, micro_batches: int, kinds: set[schedules.Kind]) -> list[list[int]]:
    """For each stage the micro-batches of its actions of some kinds, in their order."""
    found: list[list[int]] = [[] for _ in plan.stages]
    for row in schedules.split_overlaps(plan.build_schedule(micro_batches)).actions:
        for action in row:
            if action.kind in kinds and action.micro_batch is not None:
                found[action.stage].append(action.micro_batch)
    return found
