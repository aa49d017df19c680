"""Formats a console table as an HTML table, which the script of the page makes sortable and searchable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from ..html_table import sort_keys
from ..quantity import printable
from ..table import Column, FittingTable
from .section import render

# What makes tables sortable; a section with a table has them among its assets.
TABLE_ASSETS = ("tables.css", "tables.js")


class _Cell(NamedTuple):
    words: str
    key: str  # the number to sort by; empty to sort by the words
    part: float | None  # of a bar


def data_table(table: FittingTable, row_header: int = 0) -> Markup:
    """Return a table with all its rows, columns and notes. It is complete without the script.

    Args:
        table: as the console shows it. Its totals stay at the end, however the other rows are sorted.
        row_header: the column that names the rows.
    """
    cells = [_cells(column) for column in table.columns]
    rows = list(zip(*cells, strict=True))
    end = len(rows) - table.totals
    return render(
        "data_table.html",
        table=table,
        headers=[_header(column) for column in table.columns],
        rows=rows[:end],
        totals=rows[end:],
        row_header=row_header,
    )


def _header(column: Column) -> str:
    """Return the title of a column in one line; a column of numbers without a title counts the rows."""
    return column.header.replace("-\n", "-").replace("\n", " ") or ("" if column.parts else "#")


def _cells(column: Column) -> Sequence[_Cell]:
    keys = [None] * len(column.cells) if column.text and not column.parts else sort_keys(column)
    return [
        _Cell(
            "" if column.parts else printable(words),
            "" if key is None else f"{key:.12g}",
            key if column.parts else None,
        )
        for words, key in zip(column.cells, keys, strict=True)
    ]
