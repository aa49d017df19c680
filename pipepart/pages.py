"""Formats plans, traces and other values as HTML. ``reporting`` is imported at the call, to avoid an import cycle."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def to_html(value: Any) -> str:
    """Return the report of a plan or a trace as an HTML page; see :mod:`pipepart.reporting.report`."""
    return import_module("pipepart.reporting.report").to_html(value)


def notebook_html(value: Any) -> str:
    """Return HTML of a profile, plan, cut or trace for a notebook cell; see :mod:`pipepart.reporting.notebook`."""
    return import_module("pipepart.reporting.notebook").notebook_html(value)
