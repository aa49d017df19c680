"""Assembles the sections of the report into one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version

from ...input_error import InputError
from ...planning import Plan
from ...runtime.observe.trace import Trace
from ...units import counted
from .comparison import comparison_section
from .costs import costs_section
from .graph import graph_section
from .idle import idle_section
from .memory import memory_section
from .rejected import rejected_section
from .run import Run
from .section import Section, asset, render
from .stages import stages_section
from .summary import summary_section
from .timelines import timelines_section

# Each makes its section, or None where there is nothing to show. In the order of the page.
_SECTIONS: tuple[Callable[[Sequence[Run]], Section | None], ...] = (
    summary_section,
    comparison_section,
    timelines_section,
    idle_section,
    memory_section,
    stages_section,
    costs_section,
    graph_section,
    rejected_section,
)
_OWN_ASSETS = ("page.css", "page.js")


def report_html(*runs: Run, progress: Callable[[float], None] = lambda done: None) -> str:
    """Return the report of one run, or of two side by side, as an HTML page.

    The page holds its styles, scripts and data. It works from a file, without a network.

    Args:
        runs: what to show.
        progress: called with the part that is done, from 0 to 1.

    Raises:
        InputError: there is no run, or more than two.
    """
    if not 1 <= len(runs) <= 2:
        raise InputError(f"a report shows one plan, or two side by side; got {len(runs)}")
    sections = []
    for number, make in enumerate(_SECTIONS):
        progress(number / len(_SECTIONS))
        if (section := make(runs)) is not None:
            sections.append(section)
    names = dict.fromkeys([*_OWN_ASSETS, *(name for section in sections for name in section.assets)])
    return render(
        "page.html",
        title=_title(runs),
        sections=sections,
        styles=[asset(name) for name in names if name.endswith(".css")],
        scripts=[asset(name) for name in names if name.endswith(".js")],
        version=version("pipepart"),
    )


def to_html(value: Plan | Trace) -> str:
    """Return the report of one plan, or of measured steps and their plan."""
    return report_html(Run(value.plan, value) if isinstance(value, Trace) else Run(value))


def _title(runs: Sequence[Run]) -> str:
    return " and ".join(run.name or _described(run) for run in runs)


def _described(run: Run) -> str:
    model = f"{run.plan.profile.model}: " if run.plan.profile else ""
    return f"{model}{run.plan.schedule} on {counted(len(run.devices), 'device')}"
