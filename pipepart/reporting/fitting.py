"""A table that leaves out its least important columns where they have no room, and says which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# Names longer than this are folded before any column is left out; words up to the other length never are.
_NAME_WIDTH = 24
_WORD_WIDTH = 10

# Lines under the head and over the totals, nothing else.
_BOX = box.Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        header: its title; a line break in it keeps the column narrow.
        cells: one text a row.
        rank: 0 for a column that is always shown; of the others, those of the highest rank go first, together.
        name: what to call it when it is left out; by default the title in one line.
        text: names and other words, to the left and folded if need be; numbers stand to the right and never fold.
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
        """What a reader calls it."""
        return self.header.replace("\n", " ") if self.name is None else self.name

    @property
    def folds(self) -> bool:
        """Whether its cells may go over several lines."""
        return self.text and max(map(len, self.cells), default=0) > _WORD_WIDTH


@dataclass(frozen=True)
class FittingTable:
    """A table as wide as its columns need, down to those of rank 0.

    Attributes:
        title: the line above it.
        columns: from left to right, of the same number of cells.
        totals: how many rows at the end stand apart as totals.
        notes: lines below it.
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
                *(Text(cell) for cell in row), style="bold" if index >= len(rows) - self.totals else ""
            )
        return table

    def _width(self, console: Console, options: ConsoleOptions, columns: Sequence[Column]) -> int:
        """What the columns take once long names are folded."""
        wide = options.update(width=10_000)
        return Measurement.get(console, wide, self._table(columns, folded=True)).maximum
