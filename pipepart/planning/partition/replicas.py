"""Devices and costs of the stages of all replicas of a model, from the stages of the first replica."""

from __future__ import annotations

from collections.abc import Sequence

import schedules

from ...cluster import Cluster
from ..plans.stage_plan import StagePlan, transfer_seconds


def stage_devices(
    stages: Sequence[StagePlan], replica_devices: Sequence[Sequence[str]], schedule: schedules.Schedule
) -> tuple[str, ...]:
    """Return the device name of each stage of all replicas, in the schedule's numbering: replica after replica.

    Args:
        stages: the stages of the first replica.
        replica_devices: for each further replica of data parallelism, the device name of each stage.
        schedule: the schedule. A bidirectional schedule (``"chimera"``) runs a second copy on the same devices.
    """
    per_replica = schedule.stages // (1 + len(replica_devices))
    rows: dict[int, str] = {}
    for replica, names in enumerate(([stage.device for stage in stages], *replica_devices)):
        rows.update(zip(schedule.device_of[replica * per_replica :], names, strict=False))
    return tuple(rows[row] for row in schedule.device_of)


def all_stages(
    stages: Sequence[StagePlan], names: Sequence[str], cluster: Cluster, own_state: bool
) -> tuple[StagePlan, ...]:
    """Return the stages of all replicas.

    Further replicas hold parameters, gradients and buffers. They hold optimizer state if each steps its own optimizer.

    Args:
        stages: the stages of the first replica.
        names: the device name of each stage, from :func:`stage_devices`.
        cluster: the devices.
        own_state: True if each replica steps its own optimizer: all-reduces sum the gradients, or replicas share the
            parameters.
    """
    replica_stages = list(stages)
    for first in range(len(stages), len(names), len(stages)):
        devices = names[first : first + len(stages)]
        transfers = transfer_seconds(stages, devices, cluster)
        for stage, device, seconds in zip(stages, devices, transfers, strict=True):
            replica_stages.append(_on_device(stage, device, seconds, cluster, own_state))
    return tuple(replica_stages)


def _on_device(
    stage: StagePlan, name: str, transfer_seconds: float, cluster: Cluster, own_state: bool
) -> StagePlan:
    """Return the stage of a further replica, with the costs on its device."""
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
            **({} if own_state else without_state),
        }
    )
