"""The order of actions that was searched for the stages of a plan, as the plan keeps it: text."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import schedules

SEARCH = "search"  # the name of a schedule that is known by its actions alone


def order_text(schedule: schedules.Schedule) -> tuple[tuple[str, ...], ...]:
    """The actions of each device."""
    return tuple(tuple(map(str, row)) for row in schedule.actions)


def searched_order(actions: Sequence[Sequence[str]], micro_batches: int) -> schedules.Schedule:
    """The schedule of these actions, for as many micro-batches as they have or fewer.

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
