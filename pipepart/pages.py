"""HTML pages of values: the room that makes pages lies above those of the values, and is imported at the call."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def to_html(value: Any) -> str:
    """Return the report of a plan or a trace as a page; see :mod:`pipepart.reporting.report`."""
    return import_module("pipepart.reporting.report").to_html(value)
