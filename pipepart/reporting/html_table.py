"""Formats a table as HTML: with inline styles for a notebook, or plain for a page that has its own styles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from .quantity import printable
from .table import Column, FittingTable

_BAR_WIDTH = 64  # pixels
_NUMBER = re.compile(r"[<+]?(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*([KMGT]iB)?")
_FACTORS = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def html_table(table: FittingTable, *, most_rows: int | None = None, most_rank: int | None = None) -> str:
    """Return a table for a notebook, whose viewers strip scripts and style sheets.

    Args:
        table: as the console shows it.
        most_rows: of more rows only the first and the last are shown, with the number of the others between them.
        most_rank: columns of a higher rank are left out.
    """
    columns = [column for column in table.columns if most_rank is None or column.rank <= most_rank]
    rows = len(columns[0].cells)
    first, last = rows, rows  # rows before and from which on all are shown
    if most_rows is not None and rows > most_rows:
        at_end = max(most_rows // 4, table.totals + 1)
        first, last = most_rows - at_end, rows - at_end

    def row(place: int) -> str:
        weight = ";font-weight:bold" if place >= rows - table.totals else ""
        cells = (
            f'<td style="{_alignment(column)}{weight}">{html_cell(column, place)}</td>' for column in columns
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = [*map(row, range(first)), *map(row, range(last, rows))]
    if first < last:
        more = f"… {last - first:,} more"
        body.insert(
            first,
            f'<tr><td colspan="{len(columns)}" style="text-align:left;padding:1px 8px">{more}</td></tr>',
        )
    head = "".join(f'<th style="{_alignment(column)}">{html_header(column)}</th>' for column in columns)
    return (
        '<table style="border-collapse:collapse;margin:4px 0">'
        f'<caption style="text-align:left;font-weight:bold;caption-side:top">{text(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def html_header(column: Column) -> str:
    """Return the title of a column."""
    return "<br>".join(map(text, column.header.split("\n")))


def html_cell(column: Column, row: int) -> str:
    """Return the content of a cell: its text, or its bar as a small picture."""
    if not column.parts:
        return text(column.cells[row])
    part = column.parts[row]
    if part is None:
        return ""
    width = min(max(part, 0.0), 1.0) * _BAR_WIDTH
    return (
        f'<svg width="{_BAR_WIDTH}" height="10" aria-hidden="true">'
        f'<rect width="{width:.1f}" height="10" fill="#3b82c4"/></svg>'
    )


def sort_keys(column: Column) -> Sequence[float | None]:
    """Return the numbers that cells begin with, in bytes where they are sizes; None where a cell has none.

    >>> sort_keys(Column("size", ["1.5 KiB", "3 B", "–", "<0.01", "+12%"]))
    [1536.0, 3.0, None, 0.01, 12.0]
    """
    if column.parts:
        return column.parts
    found = [_NUMBER.match(cell) for cell in column.cells]
    return [match and float(match[1].replace(",", "")) * _FACTORS[match[2]] for match in found]


def text(words: str) -> str:
    """Escape words for HTML, and characters that do not print: names of layers may hold any."""
    return escape(printable(words))


def _alignment(column: Column) -> str:
    if column.text:  # names of layers may be long
        return "text-align:left;padding:1px 8px;max-width:440px;overflow-wrap:break-word"
    return "text-align:right;padding:1px 8px;white-space:nowrap"
