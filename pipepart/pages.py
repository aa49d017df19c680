"""HTML of values: the room that makes pages and notebook cells lies above theirs, and is imported at the call."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def to_html(value: Any) -> str:
    """Return the report of a plan or a trace as a page; see :mod:`pipepart.reporting.report`."""
    return import_module("pipepart.reporting.report").to_html(value)


def notebook_html(value: Any) -> str:
    """Return what a notebook shows of a profile, plan, cut or trace; see :mod:`pipepart.reporting.notebook`."""
    return import_module("pipepart.reporting.notebook").notebook_html(value)
