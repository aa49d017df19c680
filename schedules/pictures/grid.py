"""Formats a schedule for a notebook cell: a table of actions with one row per device, coloured by kind."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..core.action import Action
from .colours import FAINT, LOOKS, TEXT, fill_of

_MOST_ROWS, _MOST_COLUMNS = 16, 40
_CELL = "padding:1px 5px;text-align:center;border:1px solid"


def grid_html(title: str, rows: Sequence[Sequence[Action]], device_of: Sequence[int]) -> str:
    """Return the actions of each device in order, as HTML without scripts or style sheets.

    Of more than 16 devices or 40 actions the first and the last are shown. Cells in a column need not run at the same
    time: a schedule fixes only the order.

    Args:
        title: stands above the table.
        rows: the actions of each device.
        device_of: the device of each stage.
    """
    chunk_of = {}
    for stage, device in enumerate(device_of):
        chunk_of[stage] = sum(home == device for home in device_of[:stage])
    longest = max(map(len, rows), default=0)
    lines = []
    for device in _shown(len(rows), _MOST_ROWS):
        if device is None:
            left_out = len(rows) - _MOST_ROWS
            lines.append(f'<tr><td colspan="{_MOST_COLUMNS + 2}">… {left_out:,} more devices</td></tr>')
            continue
        cells = [_cell(rows[device], at, chunk_of) for at in _shown(longest, _MOST_COLUMNS)]
        lines.append(f'<tr><th style="text-align:right;padding:1px 5px">{device}</th>{"".join(cells)}</tr>')
    more = longest - _MOST_COLUMNS
    note = f"<p>… stands for {more:,} actions of each device.</p>" if more > 0 else ""
    return (
        f'<div style="overflow-x:auto"><p style="margin:2px 0"><b>{escape(title)}</b></p>'
        f'<table style="border-collapse:collapse;font-size:12px"><tbody>{"".join(lines)}</tbody></table>'
        f"{_legend(rows)}{note}</div>"
    )


def _shown(count: int, most: int) -> list[int | None]:
    """Return the indices that are shown, with None where some are left out."""
    if count <= most:
        return list(range(count))
    at_end = most // 4
    return [*range(most - at_end), None, *range(count - at_end, count)]


def _cell(row: Sequence[Action], at: int | None, chunk_of: dict[int, int]) -> str:
    if at is None:
        return "<td>…</td>"
    if at >= len(row):
        return "<td></td>"
    action = row[at]
    leaf = action.leaves[-1]
    fill, ink = fill_of(leaf.kind, chunk_of[leaf.stage]) if leaf.kind in LOOKS else ("#ffffff", TEXT)
    return f'<td style="background:{fill};color:{ink};{_CELL} {FAINT}">{_words(action)}</td>'


def _words(action: Action) -> str:
    return "+".join(map(str, action.leaves))


def _legend(rows: Sequence[Sequence[Action]]) -> str:
    kinds = {leaf.kind for row in rows for action in row for leaf in action.leaves}
    keys = [
        f'<span style="background:{look.light};color:{TEXT};padding:0 5px">{kind.value}</span> {look.word}'
        for kind, look in LOOKS.items()
        if kind in kinds
    ]
    return (
        f'<p style="margin:2px 0;font-size:12px">2F5: stage 2, forward, micro-batch 5. {", ".join(keys)}</p>'
    )
