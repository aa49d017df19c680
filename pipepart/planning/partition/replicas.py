"""Stages of the further replicas of a model: their devices, their costs, and the seconds to bring replicas together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import schedules

from ...cluster import Cluster
from ..stage_plan import StagePlan
from ..straight import StageLinks

# Gradients summed, or parameters copied, on one CPU core: 64 MiB take 13 ms.
_CPU_BYTES_PER_SECOND = 5e9


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
    """The stages of all replicas. Further replicas hold parameters, gradients and buffers, and no optimizer state.

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
            _transfer_seconds(stages, own, cluster)
            if has_profile
            else [stage.transfer_seconds for stage in stages]
        )
        found += map(_moved, stages, own, transfers, [cluster] * len(stages))
    return tuple(found)


def reduce_seconds(stages: Sequence[StagePlan], model_stages: int, cluster: Cluster) -> list[float]:
    """Seconds of each stage of all replicas to sum the gradients and to distribute the parameters.

    The first replica fetches the gradients of the others one after the other and adds them up; they fetch the changed
    parameters at the same time. In the memory of a CPU nothing travels, but everything is read and written.
    """
    found = [0.0] * len(stages)
    for number, stage in enumerate(stages[:model_stages]):
        others = [other.device for other in stages[number + model_stages :: model_stages]]
        links = [cluster.link_between(stage.device, other) for other in others]
        fetched = (link.seconds(stage.parameter_bytes) for link in links)
        found[number] = sum(link.seconds(stage.gradient_bytes) for link in links) + max(fetched, default=0.0)
        if cluster.device(stage.device).torch_device == "cpu":
            copied = len(others) * (stage.gradient_bytes + stage.parameter_bytes)
            found[number] += copied / _CPU_BYTES_PER_SECOND
    return found


def _moved(stage: StagePlan, name: str, transfer_seconds: float, cluster: Cluster) -> StagePlan:
    """The stage of a further replica, on another device."""
    slower = cluster.device(stage.device).speed / cluster.device(name).speed
    return stage.model_copy(
        update={
            "device": name,
            "forward_seconds": stage.forward_seconds * slower,
            "backward_input_seconds": stage.backward_input_seconds * slower,
            "backward_weight_seconds": stage.backward_weight_seconds * slower,
            "split_seconds": None if stage.split_seconds is None else stage.split_seconds * slower,
            "recompute_seconds": stage.recompute_seconds * slower,
            "transfer_seconds": transfer_seconds,
            "static_bytes": stage.static_bytes - stage.optimizer_bytes,
            "optimizer_bytes": 0,
        }
    )


def _transfer_seconds(stages: Sequence[StagePlan], names: Sequence[str], cluster: Cluster) -> list[float]:
    """Seconds to move the inputs and outputs of each stage and their gradients between these devices."""
    borders, links = [0.0], StageLinks(cluster, names)
    trains, ways = False, []
    for stage, (one, other) in zip(stages, pairwise(names), strict=False):
        trains = trains or stage.gradient_bytes > 0
        ways.append(2 if trains else 1)
        once = 0.0 if one == other else cluster.link_between(one, other).seconds(stage.output_bytes)
        borders.append(ways[-1] * once)
    found = [before + behind for before, behind in pairwise([*borders, 0.0])]
    for number, stage in enumerate(stages):
        for skip in stage.skips:
            once = skip.bytes * links.seconds_per_byte(number, skip.target)
            found[number] += ways[number] * once
            found[skip.target] += ways[skip.target - 1] * once
    return found
