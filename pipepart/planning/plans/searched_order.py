"""The order of a plan whose schedule is known by its actions alone, as text."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import schedules

SEARCH = "search"  # the name of such a schedule


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
    found = schedules.Schedule.from_csv(text.getvalue(), SEARCH)
    if not actions:
        raise schedules.ScheduleError(
            "a schedule that was searched for is known by its actions, and there are none"
        )
    schedules.check(found)
    if micro_batches > found.micro_batches:
        raise schedules.ScheduleError(
            f"the schedule was searched for {found.micro_batches} micro-batches, there is none for {micro_batches}"
        )
    return schedules.without_micro_batches(found, micro_batches)
