"""Formats a console table as an HTML table, which the script of the page makes sortable and searchable."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from ..quantity import printable
from ..table import Column, FittingTable
from .section import render

# What makes tables sortable; a section with a table has them among its assets.
TABLE_ASSETS = ("tables.css", "tables.js")

_NUMBER = re.compile(r"[<+]?(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*([KMGT]iB|[µm]?s\b)?")
_FACTORS = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "µs": 1e-6, "ms": 1e-3, "s": 1}


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
    keys = [None] * len(column.cells) if column.text and not column.parts else _sort_keys(column)
    return [
        _Cell(
            "" if column.parts else printable(words),
            "" if key is None else f"{key:.12g}",
            key if column.parts else None,
        )
        for words, key in zip(column.cells, keys, strict=True)
    ]


def _sort_keys(column: Column) -> Sequence[float | None]:
    """Return the numbers that cells begin with, in bytes and seconds where they have units; None where a cell has none.

    >>> _sort_keys(Column("size", ["1.5 KiB", "3 B", "–", "<0.01", "+12%", "5 ms"]))
    [1536.0, 3.0, None, 0.01, 12.0, 0.005]
    """
    if column.parts:
        return column.parts
    found = [_NUMBER.match(cell) for cell in column.cells]
    return [match and float(match[1].replace(",", "")) * _FACTORS[match[2]] for match in found]
