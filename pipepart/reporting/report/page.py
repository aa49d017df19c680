"""Assembles the report: one HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from schedules.pictures.colours import LOOKS

from ...input_error import InputError
from ...planning import Plan
from ...runtime.observe.trace import Trace
from ...units import counted
from ..html_table import html_table
from ..quantity import printable
from ..table import FittingTable
from .layers import layers_section
from .memory import memory_section
from .plans import differences_section, rejected_section, stages_section
from .run import Run
from .summary import summary_section
from .timelines import kind_class, timelines_section

_FOLDER = Path(__file__).parent

# In the order of the page. Each returns the values that page.html shows, or None where there is nothing to show.
_SECTIONS = {
    "Summary": summary_section,
    "Differences": differences_section,
    "Timelines": timelines_section,
    "Memory": memory_section,
    "Stages": stages_section,
    "Layers": layers_section,
    "Rejected plans": rejected_section,
}


def report_html(*runs: Run) -> str:
    """Return the report of one run, or of two side by side, as an HTML page.

    The page holds its styles and its script. It works from a file, without a network.

    Args:
        runs: what to show.

    Raises:
        InputError: there is no run, or more than two.
    """
    if not 1 <= len(runs) <= 2:
        raise InputError(f"a report shows one plan, or two side by side; got {len(runs)}")
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    # Browsers run only the script with this hash: a name that got into the page as markup could not run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    values = {title: section(runs) for title, section in _SECTIONS.items()}
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=_title(runs),
            sections={title: content for title, content in values.items() if content is not None},
            style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_hash=f"sha256-{digest}",
            looks={kind_class(kind): look for kind, look in LOOKS.items()},
            version=version("pipepart"),
        )
    )


def to_html(value: Plan | Trace) -> str:
    """Return the report of one plan, or of measured steps and their plan."""
    return report_html(Run(value.plan, value) if isinstance(value, Trace) else Run(value))


def _title(runs: Sequence[Run]) -> str:
    return " and ".join(run.name or _described(run) for run in runs)


def _described(run: Run) -> str:
    model = f"{run.plan.profile.model}: " if run.plan.profile else ""
    return f"{model}{run.plan.schedule} on {counted(len(run.devices), 'device')}"


@cache
def _environment() -> Environment:
    """Return the Jinja environment, which escapes every value that is not Markup."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters.update(table=_table, code=_code)
    return environment


def _printable(value: Any) -> Any:
    """Write out control characters, which names of layers and devices may contain."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _table(table: FittingTable) -> Markup:
    """Return a table of the console as HTML, with its notes."""
    notes = Markup("").join(
        Markup('<p class="note">{}</p>\n').format(printable(note)) for note in table.notes
    )
    return Markup('<div class="scroll">{}</div>\n{}').format(Markup(html_table(table)), notes)


def _code(words: str) -> Markup:
    """Return a sentence whose names in backticks are code."""
    parts = (
        Markup("<code>{}</code>" if at % 2 else "{}").format(printable(part))
        for at, part in enumerate(words.split("`"))
    )
    return Markup("").join(parts)
