"""A table that leaves out its least important columns if the terminal is narrow, and names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .quantity import printable

# Names longer than this are folded before any column is left out; words up to the other length never are.
_NAME_WIDTH = 24
_WORD_WIDTH = 10

# Lines under the head and over the totals, nothing else.
_BOX = box.Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        header: its title; a line break in it keeps the column narrow.
        cells: one text a row.
        rank: 0 for a column that is always shown; the others are left out from the highest rank down.
        name: what to call it when it is left out; by default the title in one line.
        text: whether cells are words, aligned left and folded if needed. Numbers are aligned right and never fold.
        style: of its cells.
    """

    header: str
    cells: Sequence[str]
    rank: int = 0
    name: str | None = None
    text: bool = False
    style: str = ""

    @property
    def called(self) -> str:
        """The name that a note gives the column."""
        return self.header.replace("\n", " ") if self.name is None else self.name

    @property
    def folds(self) -> bool:
        """Whether cells may take several lines."""
        return self.text and max(map(len, self.cells), default=0) > _WORD_WIDTH


@dataclass(frozen=True)
class FittingTable:
    """A table that fits the console by leaving out columns of high rank.

    Attributes:
        title: the line above it.
        columns: from left to right, of the same number of cells.
        totals: number of rows at the end that are totals, set apart by a line.
        notes: lines below the table.
    """

    title: str
    columns: Sequence[Column]
    totals: int = 0
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(self.columns)
        while (rank := max(column.rank for column in shown)) and self._width(
            console, options, shown
        ) > options.max_width:
            shown = [column for column in shown if column.rank < rank]
        left_out = [column.called for column in self.columns if column not in shown and column.called]
        yield Text(self.title, style="bold")
        yield self._table(shown)
        for note in self.notes:
            yield Text(note, style="dim")
        if left_out:
            yield Text(f"Not shown at this width: {', '.join(left_out)}.", style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(self.columns))

    def _table(self, columns: Sequence[Column], folded: bool = False) -> Table:
        table = Table(box=_BOX, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        lines = max(column.header.count("\n") for column in columns)
        for column in columns:
            table.add_column(
                # Titles stand on their line, cells that fold hang from theirs.
                "\n" * (lines - column.header.count("\n")) + column.header,
                justify="left" if column.text else "right",
                no_wrap=not column.folds,
                overflow="fold",
                style=column.style,
                max_width=_NAME_WIDTH if folded and column.folds else None,
            )
        rows = list(zip(*(column.cells for column in columns), strict=True))
        for index, row in enumerate(rows):
            if self.totals and index == len(rows) - self.totals:
                table.add_section()
            table.add_row(
                *(Text(printable(cell)) for cell in row),
                style="bold" if index >= len(rows) - self.totals else "",
            )
        return table

    def _width(self, console: Console, options: ConsoleOptions, columns: Sequence[Column]) -> int:
        """The width of the columns with long names folded."""
        wide = options.update(width=10_000)
        return Measurement.get(console, wide, self._table(columns, folded=True)).maximum
