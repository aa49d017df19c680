"""Formats timelines for a notebook cell: a line of figures, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from .axis import with_unit
from .layout import Panel, lay_out
from .svg import to_svg

_MOST_ROWS = 16
_WIDTH = 860  # pixels


def panels_html(panels: Sequence[Panel]) -> str:
    """Return timelines one below another on a common axis, as HTML without scripts or style sheets.

    Args:
        panels: of the same number of devices; of more than 16 only the first are drawn.
    """
    devices = panels[0].schedule.devices
    drawn = [_first_rows(panel) for panel in panels]
    picture = to_svg(lay_out(drawn, _WIDTH, None), transparent=True)
    more = f"<p>… {devices - _MOST_ROWS:,} more devices</p>" if devices > _MOST_ROWS else ""
    # Several panels have their figures in the picture.
    head = f'<p style="margin:2px 0"><b>{escape(_head(panels[0]))}</b></p>' if len(panels) == 1 else ""
    return f'<div style="overflow-x:auto">{head}{picture}{more}</div>'


def _head(panel: Panel) -> str:
    schedule, seconds = panel.schedule, with_unit(panel.seconds)
    return f"{schedule.name}, {schedule.sizes}: {seconds}, {panel.bubble:.0%} idle"


def _first_rows(panel: Panel) -> Panel:
    schedule = replace(panel.schedule, actions=panel.schedule.actions[:_MOST_ROWS])
    labels = panel.labels and panel.labels[:_MOST_ROWS]
    starts, ends = panel.starts[:_MOST_ROWS], panel.ends[:_MOST_ROWS]
    return panel._replace(schedule=schedule, starts=starts, ends=ends, labels=labels)
