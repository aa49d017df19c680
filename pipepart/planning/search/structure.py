"""What all cuts under one named schedule share: the schedule, its stash counts, and the order to simulate it in."""

from __future__ import annotations

from functools import lru_cache

import schedules

from ..costs.stage_memory import Mode, StashCounts, with_modes
from .step_times import Levels

# They depend on four numbers and no costs, so one call of the planner may use those of another.
_KEPT = 1024


@lru_cache(_KEPT)
def named_schedule(name: str, devices: int, micro_batches: int, chunks: int) -> schedules.Schedule:
    """Return the schedule of one replica, without recomputes.

    Raises:
        ScheduleError: there is none for these numbers.
    """
    return schedules.build(name, devices=devices, micro_batches=micro_batches, chunks=chunks)


@lru_cache(_KEPT)
def stash_counts(
    name: str, devices: int, micro_batches: int, chunks: int, mode: Mode, replicas: int
) -> StashCounts:
    """Return the stash counts if all stages do as the mode says, and the first of the replicas adds up gradients."""
    bare = named_schedule(name, devices, micro_batches, chunks)
    return StashCounts(with_modes(bare, [mode]), replicas=replicas * bare.replicas)


@lru_cache(_KEPT)
def levels(
    name: str, devices: int, micro_batches: int, chunks: int, may_recompute: bool, on_links: bool
) -> Levels:
    """Return the levels of the schedule's actions; see :class:`.Levels`."""
    bare = named_schedule(name, devices, micro_batches, chunks)
    return Levels(bare, may_recompute, on_links)
