"""Objectives to minimise: the makespan, or the longest time from first start to last end of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..analysis.timeline import Timeline
from ..core.action import ScheduleError
from .problem import Problem, Row

Objective = Callable[[Problem, Sequence[Row], Sequence[float]], float]


def makespan(problem: Problem, rows: Sequence[Row], ends: Sequence[float]) -> float:
    """Return the time in seconds at which the last operation ends."""
    return max(ends[row[-1]] for row in rows if row)


def longest_span(problem: Problem, rows: Sequence[Row], ends: Sequence[float]) -> float:
    """Return the longest time between the first start and the last end of one device."""
    return max(ends[row[-1]] - ends[row[0]] + problem.seconds[row[0]] for row in rows if row)


OBJECTIVES: dict[str, Objective] = {"makespan": makespan, "zero-bubble": longest_span}


def check_objective(name: str) -> None:
    """Raise ScheduleError if there is no objective of this name."""
    if name not in OBJECTIVES:
        raise ScheduleError(f"objective is one of {', '.join(OBJECTIVES)}, got {name!r}")


def objective_seconds(timeline: Timeline, objective: str) -> float:
    """Return the value of the objective, in seconds, for a timeline."""
    return timeline.makespan if objective == "makespan" else timeline.zero_bubble_seconds
