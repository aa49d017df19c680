"""Schedules by name."""

from __future__ import annotations

from typing import Any

from .core.action import ScheduleError
from .core.schedule import Schedule
from .generators.by_name import GENERATORS, generate
from .searching.search import search


def names() -> tuple[str, ...]:
    """Return the names of the schedules that need no costs; `build` knows "search" besides."""
    return tuple(GENERATORS)


def build(name: str, devices: int, micro_batches: int, chunks: int | None = None, **options: Any) -> Schedule:
    """Return the named schedule for so many devices and micro-batches.

    chunks: stages per device; None takes what the schedule uses by itself.
    options: what else the generator of that name takes: `waves` (hanayo), `eager` (1f1b), `accumulate`
        (pipedream-2bw), and for "search" everything that `schedules.search` takes, `costs` first.

    Raises ScheduleError when there is no such name or option, or the schedule does not exist for these
    numbers.

    >>> print(build("1f1b", devices=2, micro_batches=2).to_csv(), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    if name in GENERATORS:
        return generate(name, devices, micro_batches, chunks, options)
    if name in ("search", "auto"):
        if "costs" not in options:
            raise ScheduleError(f"{name!r} is made from costs: build({name!r}, ..., costs=StageCosts(...))")
        return search(devices=devices, micro_batches=micro_batches, **options)
    raise ScheduleError(f"no schedule is called {name!r}; there are {', '.join(names())}, and search")
