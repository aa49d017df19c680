"""Lines of a label and a text each, under a title."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .quantity import printable


def labelled_lines(title: str, lines: list[tuple[str, str]]) -> Group:
    """Lay out (label, text) pairs in two columns."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in lines:
        grid.add_row(label, Text(printable(value)))
    return Group(Text(title, style="bold"), grid)
