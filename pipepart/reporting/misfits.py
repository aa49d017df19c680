"""A model that does not fit: why, and the changes that would make it fit, the cheapest first."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ..planning import DoesNotFit, Remedy
from ..planning.feasibility.suggestions import remedies_text
from .fitting import Column, FittingTable
from .quantity import TimeUnit, percent, size


def misfit_report(error: DoesNotFit, before: str = "") -> Group:
    """The reason in a paragraph, and the changes as a table.

    Args:
        error: what the planner raised.
        before: words before the reason.
    """
    outlook = remedies_text(error.remedies)
    reason = str(error).removesuffix(outlook).rstrip()
    parts: list[RenderableType] = [Text(f"{before}{reason}"), Text()]
    return Group(*parts, _table(error.remedies) if error.remedies else Text(outlook))


def _table(remedies: tuple[Remedy, ...]) -> FittingTable:
    unit = TimeUnit.for_all(remedy.step_seconds for remedy in remedies)
    notes = []
    if any(remedy.estimated for remedy in remedies):
        notes.append("*: estimated from the sizes that were profiled; profile this one to plan with it.")
    return FittingTable(
        "What would fit, the cheapest change first",
        [
            Column("", [str(number) for number, _ in enumerate(remedies, 1)]),
            Column("change", [_change(remedy) for remedy in remedies], text=True),
            Column(
                f"step\n{unit.name}",
                [f"{unit.text(remedy.step_seconds)}{'*' if remedy.estimated else ''}" for remedy in remedies],
            ),
            Column("bubble", [percent(remedy.plan.predicted.bubble) for remedy in remedies], rank=1),
            Column("memory", [size(max(remedy.plan.predicted.memory_bytes)) for remedy in remedies]),
        ],
        notes=["Memory: the most that any device holds.", *notes],
    )


def _change(remedy: Remedy) -> str:
    """As options of the command line; devices in words."""
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in remedy.options.items())
    return options or remedy.change
