"""Prints tables that fit the terminal: a narrow terminal omits the least important columns and lists their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .quantity import NONE, TimeUnit, percent, printable, size

# Room for every column: a file is not read at the width of the terminal that made it.
_FILE_WIDTH = 240
# Names longer than this are folded before any column is left out; words up to the other length never are.
_NAME_WIDTH = 24
_WORD_WIDTH = 10

# For terminals and files of another encoding than UTF-8; each is one character wide, so that columns stay aligned.
_IN_ASCII = str.maketrans("–×µ±─→█▉▊▋▌▍▎▏", "-xu~->#####   ")

# Lines under the head and over the totals, nothing else.
_BOX = box.Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")


def show(*reports: RenderableType, file: TextIO | None = None) -> None:
    """Print reports to ``file`` or standard output, with an empty line between them.

    A terminal gets colours and tables that fit it; a file or a pipe gets plain text with every column, unless the
    environment sets ``COLUMNS``.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH
    with console.capture() as captured:
        for index, report in enumerate(reports):
            if index:
                console.print()
            # Tables fit; lines to copy are left to the terminal to wrap.
            console.print(_Printable(report), crop=False)
    text = captured.get()
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        text = text.translate(_IN_ASCII)
    # Cells are filled up with spaces, which a terminal hides and a file keeps.
    text = "\n".join(line.rstrip() for line in text.splitlines())
    print(text.encode(console.encoding, "replace").decode(console.encoding), file=console.file, flush=True)


@dataclass(frozen=True)
class _Printable:
    """A report whose control characters are written out: names from files must not reach the terminal as codes."""

    report: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = Text(self.report) if isinstance(self.report, str) else self.report
        for segment in console.render(report, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def labelled_lines(title: str, lines: Sequence[tuple[str, str]]) -> Group:
    """Lay out (label, text) pairs in two columns under a title."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in lines:
        grid.add_row(Text(printable(label)), Text(printable(value)))  # a plain string would be markup
    return Group(Text(title, style="bold"), grid)


def lines_to_copy(lines: Sequence[str]) -> Text:
    """Lay out lines that are never wrapped, so that each can be copied."""
    return Text(printable("\n".join(lines)), no_wrap=True, overflow="ignore")


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
        parts: of a column of bars, the length of each from 0 to 1; None is no bar.
    """

    header: str
    cells: Sequence[str]
    rank: int = 0
    name: str | None = None
    text: bool = False
    style: str = ""
    parts: Sequence[float | None] = ()

    @property
    def called(self) -> str:
        """The name of the column in notes."""
        return self.header.replace("\n", " ") if self.name is None else self.name

    @property
    def folds(self) -> bool:
        """True if cells may take several lines."""
        return self.text and max(map(len, self.cells), default=0) > _WORD_WIDTH


def times(header: str, seconds: Sequence[float | None], unit: TimeUnit, rank: int = 0, **more: Any) -> Column:
    """Make a column of times in a unit, which its title names; None is a dash."""
    cells = [NONE if each is None else unit.text(each) for each in seconds]
    return Column(f"{header}\n{unit.name}", cells, rank, **more)


def sizes(header: str, counts: Sequence[int | None], rank: int = 0, **more: Any) -> Column:
    """Make a column of bytes; None is a dash."""
    return Column(header, list(map(size, counts)), rank, **more)


def percents(header: str, parts: Sequence[float | None], rank: int = 0, **more: Any) -> Column:
    """Make a column of fractions as percent; None is an empty cell."""
    cells = ["" if part is None else percent(part) for part in parts]
    return Column(header, cells, rank, **more)


def bars(parts: Sequence[float | None], rank: int) -> Column:
    """Make a column of bars, of at most 8 characters, for parts from 0 to 1; None is no bar."""
    cells = ["" if part is None else _bar(part) for part in parts]
    return Column("", cells, rank, text=True, style="cyan", parts=tuple(parts))


def _bar(part: float) -> str:
    whole, eighths = divmod(round(min(max(part, 0.0), 1.0) * 64), 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")


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
        while not (fits := self._width(console, options, shown) <= options.max_width):
            rank = max(column.rank for column in shown)
            if rank == 0:
                break
            shown = [column for column in shown if column.rank < rank]
        left_out = [column.called for column in self.columns if column not in shown and column.called]
        yield Text(self.title, style="bold")
        yield self._table(shown, fold=not fits)
        for note in self.notes:
            yield Text(note, style="dim")
        if left_out:
            yield Text(f"Not shown at this width: {', '.join(left_out)}.", style="dim")

    def _table(self, columns: Sequence[Column], *, narrow: bool = False, fold: bool = False) -> Table:
        """Make the table; ``narrow`` with long names folded, ``fold`` with cells of any column folded if needed."""
        table = Table(box=_BOX, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        lines = max(column.header.count("\n") for column in columns)
        for column in columns:
            table.add_column(
                # Titles stand on their line, cells that fold hang from theirs.
                Text("\n" * (lines - column.header.count("\n")) + printable(column.header)),
                justify="left" if column.text else "right",
                no_wrap=not (fold or column.folds),
                overflow="fold",
                style=column.style,
                max_width=_NAME_WIDTH if narrow and column.folds else None,
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
        return Measurement.get(console, wide, self._table(columns, narrow=True)).maximum
