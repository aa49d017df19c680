"""Draws a timeline as text, as wide as the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from schedules import Kind, Timeline

from ..units import format_seconds

# Longer lines in a file would not show more.
_WIDEST = 140
_STYLES = {
    r"\d*[fF]+": "cyan",
    r"\d*[bB]+": "magenta",
    r"\d*[iI]+": "green",
    r"\d*[wW]+": "yellow",
    r"\d*[rR]+": "blue",
    r"[gG]+": "red",
    r"\.+": "dim",
}
_WORDS = {
    Kind.F: "0f: forward of micro-batch 0",
    Kind.B: "0b: its backward",
    Kind.I: "0i: its backward for the inputs",
    Kind.W: "0w: for the weights",
    Kind.RECOMPUTE: "0r: recompute",
    Kind.OFFLOAD: "0o, 0l: copies to the host and back",
    Kind.REDUCE_GRAD: "g: sum of the replicas' gradients",
    Kind.OVERLAP_F_B: "1x0x: a forward beside a backward",
}


def drawn_timeline(
    timeline: Timeline, title: str = "Timeline of one step", devices: Sequence[str] = ()
) -> Group:
    """Return a drawing of a simulated or measured timeline with its legend, to print with :func:`show`.

    Args:
        timeline: start and end of each action.
        title: stands above it.
        devices: their names, one a line of the picture.
    """
    schedule = timeline.schedule
    kinds = {action.kind for row in schedule.actions for action in row}
    words = [text for kind, text in _WORDS.items() if kind in kinds]
    if schedule.stages > schedule.devices:
        words.append("capitals: every second stage of a device")
    named = any(not name.endswith(f":{row}") for row, name in enumerate(devices))
    names = f" ({', '.join(f'{row} {name}' for row, name in enumerate(devices))})" if named else ""
    return Group(
        Text(f"{title}, {format_seconds(timeline.makespan)}", style="bold"),
        _Picture(timeline),
        Text(f"One line a device{names}. {'; '.join([*words, 'dots: idle'])}.", style="dim"),
    )


@dataclass(frozen=True)
class _Picture:
    """One line a device, as wide as the console."""

    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = self.timeline.draw(width=min(options.max_width, _WIDEST))
        picture = Text(drawn, no_wrap=True, overflow="ignore")
        for pattern, style in _STYLES.items():
            picture.highlight_regex(pattern, style)
        yield picture
