"""Reads a plan that was saved, edited since or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ..planning import Plan
from .errors import Mistake

PLAN_HELP = "A plan that was saved, as in plan.json; it may have been edited."
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", show_default=False, help=PLAN_HELP)]


def load_plan(path: Path) -> Plan:
    """The plan, its figures computed from its stages.

    Raises:
        Mistake: there is no such file.
        ValueError: it holds no plan, or one that is not possible.
    """
    try:
        return Plan.load(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Mistake(f"cannot read the plan {str(path)!r}: {reason}") from None


def as_in_file(path: Path) -> Plan | None:
    """The plan with the figures that stand in the file; None where these alone would not be a plan."""
    try:
        return Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError:
        return None
