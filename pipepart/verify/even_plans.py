"""Makes the plans of a check: stages of equally many layers, under each schedule and recompute mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch

import schedules as known_schedules

from ..capture import Chain
from ..cluster import Cluster, as_cluster
from ..data.recorded import entered
from ..data.split import Splitter, micro_batches_of
from ..input_error import InputError
from ..planning import Plan, StagePlan
from ..planning.costs.stage_memory import Recompute


def even_plans(
    chain: Chain,
    sample: tuple[Any, Any],
    split: Splitter | None,
    devices: int | Sequence[torch.device | str] | Cluster,
    schedules: Sequence[str],
    micro_batches: int | None,
    recompute: Sequence[Recompute],
    samples: int,
) -> list[Plan]:
    """Return one plan for each schedule and recompute mode; arguments as for :func:`pipepart.check`.

    Args:
        chain: of the model; one without layers is recorded with the first micro-batch.
        sample: input and target of the mini-batch.
        split: of the user, or None.
        devices: a number, torch devices or a cluster.
        schedules: their names.
        micro_batches: their number; None for two a device. At most one a sample is made.
        recompute: the modes.
        samples: of the mini-batch.

    Raises:
        TypeError: these are no devices.
        ValueError: an unknown name, a number below 1, a schedule that changes the weights within a step, or one with
            more stages than there are layers.
    """
    cluster = as_cluster(devices)
    count = 2 * len(cluster) if micro_batches is None else micro_batches
    require(count >= 1, f"micro_batches must be at least 1, got {count}")
    require(len(schedules) > 0, "no schedule is named: there is nothing to compare")
    for mode in recompute:
        require_known("recompute", mode, get_args(Recompute))
    if not chain.layers:
        batch = micro_batches_of(*sample, min(count, samples), split)
        entered(chain, batch._replace(inputs=batch.inputs[:1]))
    names = [name for name, _ in chain.layers]
    return [
        _even_plan(names, cluster, schedule, min(count, samples), mode)
        for schedule in dict.fromkeys(schedules)
        for mode in dict.fromkeys(recompute)
    ]


def _even_plan(
    names: Sequence[str], cluster: Cluster, schedule: str, micro_batches: int, recompute: Recompute
) -> Plan:
    """Return a plan whose stages have equally many layers, or one more."""
    built = known_schedules.build(schedule, devices=len(cluster), micro_batches=micro_batches)
    if built.versions:
        raise InputError(
            f"schedule {schedule!r} changes the weights within a step, by design: choose another"
        )
    stages = built.model_stages
    if len(names) < stages:
        raise InputError(
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
        chunks=stages // len(cluster),
    )


def require(is_so: bool, otherwise: str) -> None:
    """Raise a ValueError with this text if a condition does not hold."""
    if not is_so:
        raise InputError(otherwise)


def require_known(what: str, name: str, known: Sequence[str]) -> None:
    """Raise a ValueError if a name is not among the known ones, which it lists."""
    require(name in known, f"{what} {name!r}: choose among {', '.join(known)}")
