"""Builds the schedule of a plan's step: of a named schedule, or of actions that were searched for."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import schedules

from ..costs.stage_memory import Mode, StashCounts, with_modes

SEARCH = "search"  # the name of a schedule that is known by its actions alone
_CACHED = 8  # schedules, which may have megabytes each


class StepOrder(NamedTuple):
    """All that the schedule of a step depends on; the names are those of a plan's fields.

    Attributes:
        modes: of the stages.
        replicas: of the model on devices of their own.
    """

    schedule: str
    chunks: int
    actions: tuple[tuple[str, ...], ...]
    split_critical: tuple[str, ...]
    micro_batches: int
    modes: tuple[Mode, ...]
    replicas: int


@lru_cache(_CACHED)
def build_order(order: StepOrder) -> schedules.Schedule:
    """Return the schedule of a step of all replicas.

    Raises:
        ScheduleError: there is none.
    """
    per_replica = -(-order.micro_batches // order.replicas)
    if order.schedule == SEARCH:
        bare = searched_order(order.actions, per_replica)
    else:
        devices = len(order.modes) // order.chunks
        bare = schedules.build(order.schedule, devices, per_replica, order.chunks)
    alone = with_modes(bare, order.modes)
    if order.split_critical:
        alone = schedules.split_backward(alone, map(schedules.Action.parse, order.split_critical))
    built = schedules.replicate(alone, order.replicas, order.micro_batches)
    return schedules.insert_reduce_grad(built) if built.replicas > 1 else built


@lru_cache(_CACHED)
def even_counts(order: StepOrder, summed_replicas: int) -> StashCounts:
    """Return what stages hold in a step in which all of them take equal times.

    Args:
        order: of the step.
        summed_replicas: that sum their gradients.
    """
    return StashCounts(build_order(order), replicas=summed_replicas)


def order_text(schedule: schedules.Schedule) -> tuple[tuple[str, ...], ...]:
    """Return the actions of each device as text, as ``Plan.actions`` has them."""
    return tuple(tuple(map(str, row)) for row in schedule.actions)


def searched_order(actions: Sequence[Sequence[str]], micro_batches: int) -> schedules.Schedule:
    """Return the schedule of these actions, for as many micro-batches as they have or fewer.

    Raises:
        ScheduleError: an action is none, the devices would wait for each other for ever, or there are too few
            micro-batches.
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
