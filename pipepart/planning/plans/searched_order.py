"""Builds the schedule of a plan's step, from a schedule name or from the actions of a searched order."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import schedules

from ..costs.stage_memory import Mode, StashCounts, with_modes

SEARCH = "search"  # name of a schedule defined by its list of actions
_CACHED = 8  # number of cached schedules, which may have megabytes each


class StepOrder(NamedTuple):
    """Everything that the schedule of a step depends on; most fields are fields of a plan.

    Attributes:
        modes: [stages]: the mode of each stage.
        replicas: number of replicas, each on separate devices.
    """

    schedule: str
    chunks: int
    actions: tuple[tuple[str, ...], ...]
    micro_batches: int
    modes: tuple[Mode, ...]
    replicas: int


@lru_cache(_CACHED)
def build_order(order: StepOrder) -> schedules.Schedule:
    """Return the schedule of a step for all replicas.

    Raises:
        ScheduleError: the schedule does not exist for these numbers.
    """
    per_replica = -(-order.micro_batches // order.replicas)
    if order.schedule == SEARCH:
        bare = searched_order(order.actions, per_replica)
    else:
        devices = len(order.modes) // order.chunks
        bare = schedules.build(order.schedule, devices, per_replica, order.chunks)
    alone = with_modes(bare, order.modes)
    built = schedules.replicate(alone, order.replicas, order.micro_batches)
    return schedules.insert_reduce_grad(built) if built.replicas > 1 else built


@lru_cache(_CACHED)
def even_counts(order: StepOrder, summed_replicas: int) -> StashCounts:
    """Return the stash counts of a step in which all stages take equal times.

    Args:
        order: of the step.
        summed_replicas: number of replicas whose gradients are summed on the first replica.
    """
    return StashCounts(build_order(order), replicas=summed_replicas)


def order_text(schedule: schedules.Schedule) -> tuple[tuple[str, ...], ...]:
    """Return the actions of each device in the format of ``Plan.actions``."""
    return tuple(tuple(map(str, row)) for row in schedule.actions)


def searched_order(actions: Sequence[Sequence[str]], micro_batches: int) -> schedules.Schedule:
    """Return the schedule of these actions, for at most as many micro-batches as they have.

    Raises:
        ScheduleError: an action is invalid, the devices would deadlock, or the actions have fewer micro-batches.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(actions)
    whole = schedules.Schedule.from_csv(text.getvalue(), SEARCH)
    if not actions:
        raise schedules.ScheduleError(
            "a schedule that was searched for is known by its actions, and there are none"
        )
    schedules.check(whole)
    if micro_batches > whole.micro_batches:
        raise schedules.ScheduleError(
            f"the schedule was searched for {whole.micro_batches} micro-batches, there is none for {micro_batches}"
        )
    return schedules.without_micro_batches(whole, micro_batches)
