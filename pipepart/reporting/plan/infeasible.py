"""Report on a model that does not fit: the reason, and changes that would make it fit, shortest step first."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ...planning import InfeasiblePlanError, Suggestion
from ...planning.feasibility.suggestions import suggestions_text
from ..kit.quantity import TimeUnit, percent, size
from ..kit.table import Column, FittingTable


def infeasible_report(error: InfeasiblePlanError, before: str = "") -> Group:
    """Show the reason as a paragraph and the suggestions as a table.

    Args:
        error: of the planner.
        before: words before the reason.
    """
    parts: list[RenderableType] = [Text(f"{before}{error.reason}."), Text()]
    found = error.suggestions
    return Group(*parts, _table(found) if found else Text(suggestions_text(found)))


def _table(suggestions: tuple[Suggestion, ...]) -> FittingTable:
    unit = TimeUnit.for_all(suggestion.step_seconds for suggestion in suggestions)
    notes = []
    if any(suggestion.estimated for suggestion in suggestions):
        notes.append("*: estimated from the sizes that were profiled; profile this one to plan with it.")
    return FittingTable(
        "What would fit, shortest step first",
        [
            Column("", [str(number) for number, _ in enumerate(suggestions, 1)]),
            Column("change", [_change(suggestion) for suggestion in suggestions], text=True),
            Column(
                f"step\n{unit.name}",
                [
                    f"{unit.text(suggestion.step_seconds)}{'*' if suggestion.estimated else ''}"
                    for suggestion in suggestions
                ],
            ),
            Column(
                "bubble", [percent(suggestion.plan.predicted.bubble) for suggestion in suggestions], rank=1
            ),
            Column(
                "memory", [size(max(suggestion.plan.predicted.memory_bytes)) for suggestion in suggestions]
            ),
        ],
        notes=["Memory: the most that any device holds.", *notes],
    )


def _change(suggestion: Suggestion) -> str:
    """The change as options of the command line; devices in words."""
    texts = [] if not suggestion.devices else [suggestion.change.partition(", with ")[0]]
    for name, value in suggestion.options.items():
        option = f"--{name.replace('_', '-')}"
        texts.append(f"without {option}" if value is None else f"{option} {value}")
    return " ".join(texts)
