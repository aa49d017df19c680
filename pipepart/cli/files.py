"""Reads the files that commands are given: profiles, plans, clusters, schedules, traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

import schedules
from schedules import Schedule, ScheduleError, Timeline

from ..document import Document
from ..planning import Plan
from ..planning.feedback import step_difference
from ..profiling import Roofline
from .collector import collector_paused
from .errors import UsageError

_Kind = TypeVar("_Kind", bound=Document)

# A field that only this kind of file has at its top level.
_KINDS = {
    "cluster": "plan",
    "costs": "profile",
    "links": "cluster",
    "traceEvents": "trace",
    "device_of": "schedule",
    "flops_per_second": "roofline",
}


def read(kind: type[_Kind], path: Path) -> _Kind:
    """Read a profile, plan or cluster.

    Raises:
        UsageError: there is no such file, or it is a file of another kind.
        ValueError: the file has faults; all are named.
    """
    wanted = kind.__name__.lower()
    _check_kind(path, _text(path, wanted), wanted)
    return kind.load(path)


def _check_kind(path: Path, text: str, wanted: str) -> Any:
    """Return the value in a text of JSON, None if it is none; refuse one that is a file of another kind."""
    try:
        with collector_paused():
            value = from_json(text)  # of many megabytes, in half the time of json
    except ValueError:
        return None
    fields = value if isinstance(value, dict) else {}
    found = next((name for field, name in _KINDS.items() if field in fields), wanted)
    if found != wanted:
        raise UsageError(f"{path} is a {found}, and this command takes a {wanted}")
    return value


def read_roofline(text: str | None, measured: bool) -> Roofline | None:
    """Read a roofline from its text form, or from a file if the text ends in ``.json``.

    Raises:
        UsageError: there is no such file, it is a file of another kind, times are ``measured`` and not estimated, or
            they are estimated and there is no text.
        ValueError: the text is not of that form, or the file has faults.
    """
    if text is None:
        if not measured:
            raise UsageError(
                "--no-measure estimates times for a speed: add --roofline 'cuda: 156 TFLOP/s, 1.5 TB/s, 5 us', or "
                "that of your device"
            )
        return None
    if measured:
        raise UsageError("--roofline is to estimate times: add --no-measure")
    return read(Roofline, Path(text)) if text.endswith(".json") else Roofline.parse(text)


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from JSON, or from CSV with one line of actions per device.

    Raises:
        UsageError: the file cannot be read, or holds no schedule that runs.
    """
    text = _text(path, "schedule")
    if path.suffix == ".json":
        _check_kind(path, text, "schedule")
    try:
        found = Schedule.from_json(text) if path.suffix == ".json" else Schedule.from_csv(text, path.stem)
        schedules.check(found)
    except ScheduleError as error:
        raise UsageError(f"{path} holds no schedule that runs: {error}") from None
    return found


def read_step(path: Path, plan: Plan, plan_path: Path) -> Timeline:
    """Read the measured step of a plan that ``pipe.trace()`` has saved.

    Raises:
        UsageError: the file cannot be read, or holds no step of this plan.
    """
    value = _check_kind(path, _text(path, "trace"), "trace")
    if not isinstance(value, dict):
        raise UsageError(f"{path} is no trace that pipe.trace() has saved: it holds no JSON object")
    try:
        with collector_paused():
            step = Timeline.from_trace(value)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no trace that pipe.trace() has saved: {error}") from None
    if difference := step_difference(step.schedule, plan):
        raise UsageError(f"{path} is no step of {plan_path}: {difference}")
    return step


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the {what} {str(path)!r}: {reason}") from None
