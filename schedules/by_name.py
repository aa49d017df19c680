"""Builds schedules by name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from .core.action import ScheduleError
from .core.schedule import Schedule
from .generators.catalog import GENERATORS, check_options, generate
from .searching.search import search

_FROM_COSTS = ("search", "auto")


def names() -> tuple[str, ...]:
    """Return the names of the schedules that need no costs. `build` also accepts "search" and "auto"."""
    return tuple(GENERATORS)


def build(name: str, devices: int, micro_batches: int, chunks: int | None = None, **options: Any) -> Schedule:
    """Return the named schedule for a number of devices and micro-batches.

    Args:
        name: one of `names()`, or "search" (also called "auto").
        devices: how many devices.
        micro_batches: how many micro-batches one step has.
        chunks: stages per device; None takes the default of the schedule.
        options: further arguments of the schedule: ``waves`` (hanayo), ``accumulate``
            (pipedream-2bw). For "search", those of `schedules.search`; ``costs`` is required.

    Raises:
        ScheduleError: there is no such name or option, or the schedule does not exist for these numbers.

    >>> print(build("1f1b", devices=2, micro_batches=2).to_csv(), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    if name in GENERATORS:
        return generate(name, devices, micro_batches, chunks, options)
    if name in _FROM_COSTS:
        return _searched(name, devices, micro_batches, chunks, options)
    close = get_close_matches(str(name), [*GENERATORS, *_FROM_COSTS], n=1)
    raise ScheduleError(
        f"no schedule is called {name!r}{f'; did you mean {close[0]!r}?' if close else ';'} "
        f"there are {', '.join((*GENERATORS, *_FROM_COSTS))}"
    )


def _searched(
    name: str, devices: int, micro_batches: int, chunks: int | None, options: dict[str, Any]
) -> Schedule:
    check_options(name, search, options)
    if "costs" not in options:
        raise ScheduleError(f"{name!r} is made from costs: build({name!r}, ..., costs=StageCosts(...))")
    stages = options["costs"].stages
    if chunks is not None and stages != chunks * devices:
        raise ScheduleError(
            f"{name} with chunks={chunks} on {devices} devices needs costs of {chunks * devices} stages, "
            f"got costs of {stages}"
        )
    return search(devices=devices, micro_batches=micro_batches, **options)
