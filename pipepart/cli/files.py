"""Reads the files that commands are given: profiles, plans, clusters, schedules, traces."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic_core import from_json

import schedules
from schedules import Schedule, ScheduleError, Timeline

from ..document import Document
from ..planning import Plan
from ..planning.feedback import step_difference
from .errors import UsageError

_Kind = TypeVar("_Kind", bound=Document)


def read(kind: type[_Kind], path: Path) -> _Kind:
    """Read a profile, plan, cluster or roofline.

    Raises:
        UsageError: the file cannot be read.
        InputError: it is a file of another kind, or has faults; all are named.
    """
    try:
        return kind.load(path)
    except OSError as error:
        raise _unreadable(kind.__name__.lower(), path, error) from None


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from JSON, or from CSV with one line of actions per device.

    Raises:
        UsageError: the file cannot be read, or holds no schedule that runs.
    """
    text = _text(path, "schedule")
    try:
        schedule = Schedule.from_json(text) if path.suffix == ".json" else Schedule.from_csv(text, path.stem)
        schedules.check(schedule)
    except ScheduleError as error:
        raise UsageError(f"{path} holds no schedule that runs: {error}") from None
    return schedule


def read_step(path: Path, plan: Plan, plan_path: Path) -> Timeline:
    """Read the measured step of a plan that ``pipe.trace()`` has saved.

    Raises:
        UsageError: the file cannot be read, or holds no step of this plan.
    """
    text = _text(path, "trace")
    try:
        step = Timeline.from_trace(from_json(text))  # of many megabytes, in half the time of json
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no trace that pipe.trace() has saved: {error}") from None
    if difference := step_difference(step.schedule, plan):
        raise UsageError(f"{path} is no step of {plan_path}: {difference}")
    return step


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(what, path, error) from None


def _unreadable(what: str, path: Path, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or error
    return UsageError(f"cannot read the {what} {str(path)!r}: {reason}")
