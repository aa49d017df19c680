"""Formats a table of the console as HTML: for a notebook, whose viewers strip style sheets, and for the report."""

from __future__ import annotations

from html import escape

from .quantity import Quantity, printable
from .table import Column, FittingTable

_BAR_WIDTH = 64  # pixels


def html_table(table: FittingTable, *, most_rows: int | None = None, most_rank: int | None = None) -> str:
    """Return a table with inline styles, without its notes.

    Args:
        table: as the console shows it. Its first column names the rows.
        most_rows: of more rows only the first and the last are shown, with the number of the others between them.
        most_rank: columns of a higher rank are left out.
    """
    columns = [column for column in table.columns if most_rank is None or column.rank <= most_rank]
    rows = len(columns[0].cells)
    end = rows - table.totals
    first, last = end, end  # rows before and from which on all are shown
    if most_rows is not None and rows > most_rows:
        at_end = max(most_rows // 4, table.totals + 1)
        first, last = most_rows - at_end, rows - at_end
    body = [_row(columns, place) for place in range(first)]
    if first < last:
        more = f"… {last - first:,} more"
        body.append(
            f'<tr><td colspan="{len(columns)}" style="text-align:left;padding:1px 8px">{more}</td></tr>'
        )
    body += [_row(columns, place) for place in range(last, end)]
    totals = "".join(_row(columns, place, bold=True) for place in range(end, rows))
    head = "".join(
        f'<th scope="col" style="{_alignment(column)}">{_header(column)}</th>' for column in columns
    )
    return (
        '<table style="border-collapse:collapse;margin:4px 0">'
        f'<caption style="text-align:left;font-weight:bold;caption-side:top">{text(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
        f"{f'<tfoot>{totals}</tfoot>' if totals else ''}</table>"
    )


def _row(columns: list[Column], place: int, bold: bool = False) -> str:
    weight = "bold" if bold else "normal"
    cells = []
    for column in columns:
        tag, scope = ("th", ' scope="row"') if column is columns[0] else ("td", "")
        cell = column.cells[place]
        # What scripts sort by: a text such as "1.5 KiB" does not tell.
        key = f' data-value="{cell.value:.12g}"' if isinstance(cell, Quantity) else ""
        cells.append(
            f'<{tag}{scope}{key} style="{_alignment(column)};font-weight:{weight}">{_content(column, place)}</{tag}>'
        )
    return f"<tr>{''.join(cells)}</tr>"


def _header(column: Column) -> str:
    """Return the title of a column."""
    return "<br>".join(map(text, column.header.split("\n")))


def _content(column: Column, row: int) -> str:
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


def text(words: str) -> str:
    """Escape a text for HTML, with unprintable characters; names of layers may contain any character."""
    return escape(printable(words))


def _alignment(column: Column) -> str:
    if column.text:  # names of layers may be long
        return "text-align:left;padding:1px 8px;max-width:440px;overflow-wrap:break-word"
    return "text-align:right;padding:1px 8px;white-space:nowrap"
