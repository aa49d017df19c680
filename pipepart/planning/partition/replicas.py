"""Stages of the further replicas of a model: their devices and their costs."""

from __future__ import annotations

from collections.abc import Sequence

import schedules

from ...cluster import Cluster
from ..plans.stage_plan import StagePlan, transfer_seconds
from .reductions import runs_all_reduce


def stage_devices(
    stages: Sequence[StagePlan], replica_devices: Sequence[Sequence[str]], schedule: schedules.Schedule
) -> tuple[str, ...]:
    """The device name of each stage of all replicas, in the schedule's numbering: replica after replica.

    Args:
        stages: of the first replica.
        replica_devices: of each further replica of data parallelism, one name a stage.
        schedule: a bidirectional one (``"chimera"``) runs further replicas on the same devices.
    """
    per_replica = schedule.stages // (1 + len(replica_devices))
    rows: dict[int, str] = {}
    for replica, names in enumerate(([stage.device for stage in stages], *replica_devices)):
        rows.update(zip(schedule.device_of[replica * per_replica :], names, strict=False))
    return tuple(rows[row] for row in schedule.device_of)


def all_stages(
    stages: Sequence[StagePlan], names: Sequence[str], cluster: Cluster, has_profile: bool
) -> tuple[StagePlan, ...]:
    """The stages of all replicas.

    Further replicas hold parameters, gradients and buffers; an optimizer state only where gradients are summed by
    all-reduces, so that each replica steps its own optimizer.

    Args:
        stages: of the first replica.
        names: from :func:`stage_devices`.
        cluster: the devices.
        has_profile: False for a plan written by hand: the further replicas then have the first one's transfer seconds.
    """
    found = list(stages)
    for first in range(len(stages), len(names), len(stages)):
        own = names[first : first + len(stages)]
        transfers = (
            transfer_seconds(stages, own, cluster)
            if has_profile
            else [stage.transfer_seconds for stage in stages]
        )
        found += map(_moved, stages, own, transfers, [cluster] * len(stages))
    return tuple(found)


def _moved(stage: StagePlan, name: str, transfer_seconds: float, cluster: Cluster) -> StagePlan:
    """The stage of a further replica, on another device."""
    slower = cluster.device(stage.device).speed / cluster.device(name).speed
    without_state = {"static_bytes": stage.static_bytes - stage.optimizer_bytes, "optimizer_bytes": 0}
    return stage.model_copy(
        update={
            "device": name,
            "forward_seconds": stage.forward_seconds * slower,
            "backward_input_seconds": stage.backward_input_seconds * slower,
            "backward_weight_seconds": stage.backward_weight_seconds * slower,
            "split_seconds": None if stage.split_seconds is None else stage.split_seconds * slower,
            "recompute_seconds": stage.recompute_seconds * slower,
            "transfer_seconds": transfer_seconds,
            **({} if runs_all_reduce(cluster) else without_state),
        }
    )
