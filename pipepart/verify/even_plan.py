"""Makes a plan of a check, whose stages have equally many layers."""

from __future__ import annotations

from collections.abc import Sequence

import schedules as known_schedules

from ..cluster import Cluster
from ..input_error import InputError
from ..planning import Plan, StagePlan
from ..planning.costs.stage_memory import Recompute


def even_plan(
    names: Sequence[str], cluster: Cluster, schedule: str, micro_batches: int, recompute: Recompute
) -> Plan:
    """Return a plan whose stages have equally many layers, or one more.

    Raises:
        ValueError: the schedule is unknown, changes the weights within a step, or has more stages than layers.
    """
    built = known_schedules.build(schedule, devices=len(cluster), micro_batches=micro_batches)
    require(
        not built.versions,
        f"schedule {schedule!r} changes the weights within a step, by design: choose another",
    )
    stages = built.model_stages
    require(
        len(names) >= stages,
        f"schedule {schedule!r} on {len(cluster)} devices has {stages} stages, the model {len(names)} layers: "
        "take fewer devices or another schedule",
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
