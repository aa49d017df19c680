"""What a plan whose stages are parallel inside cannot have, and what it says of their collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...cluster import Cluster
from ...profiling import Profile
from ...units import format_seconds
from ..overhead import collectives_of_layers
from .stage_plan import StagePlan

# Schedules with several versions or copies of the weights, which no stage that is parallel inside can have.
NOT_INSIDE = ("pipedream", "pipedream-2bw", "chimera")


def inside_faults(
    tensor: int, shard: bool, replicas: int, schedule: str, stages: Sequence[StagePlan]
) -> Iterator[str]:
    """Yield one message per fault of a plan whose stages are parallel inside."""
    if shard and replicas < 2:
        yield f"shard=True shards the parameters of a stage over its replicas, and the plan has {replicas}"
    if tensor == 1 and not shard:
        return
    inside = f"tensor={tensor}" if tensor > 1 else "shard=True"
    if schedule in NOT_INSIDE:
        yield f"{inside} needs one copy of the weights, and schedule {schedule!r} has several: choose another"
    if any(stage.offload != "never" for stage in stages):
        yield f"{inside} cannot be combined with offload='stash'"


def tensor_text(
    tensor: int, stages: Sequence[StagePlan], profile: Profile | None, cluster: Cluster, micro_batches: int
) -> str:
    """Say what devices share each stage, and how long the collectives within the stages take."""
    shared = f"each stage is shared by {tensor} consecutive devices, "
    if profile is None:
        return shared + "whose collectives are not known"
    if profile.tensor == 1:
        return shared + (
            "and planned as if each had the whole layers: profile what one has by "
            f"pipepart.profile(..., parallelize=f, tensor={tensor})"
        )
    *layers, loss = map(sum, collectives_of_layers(profile, cluster, micro_batches))
    ends = np.cumsum([len(stage.layers) for stage in stages])
    taken = [float(sum(part)) for part in np.split(layers, ends[:-1])]
    taken[-1] += loss
    slowest = int(np.argmax(taken))
    return shared + (
        f"whose collectives take up to {format_seconds(taken[slowest])} of the "
        f"{format_seconds(stages[slowest].load_seconds)} of a micro-batch (stage {slowest})"
    )


def shard_text(replicas: int, seconds: float) -> str:
    """Say what shares the parameters of each stage, and how long the collectives of a step take."""
    return (
        f"the parameters of each stage are sharded over {replicas} replicas, whose collectives take up to "
        f"{format_seconds(seconds)} a step"
    )
