"""Draws a timeline as text, as wide as the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
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
    Kind.REDUCE_GRAD: "g: sum of the replicas' gradients",
    Kind.OVERLAP_F_B: "1x0x: a forward beside a backward",
}


@dataclass(frozen=True)
class DrawnTimeline:
    """A title, the picture of a timeline as wide as the console, and its legend."""

    timeline: Timeline
    title: str
    devices: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{self.title}, {format_seconds(self.timeline.makespan)}", style="bold")
        picture = Text(
            self.timeline.draw(width=min(options.max_width, _WIDEST)), no_wrap=True, overflow="ignore"
        )
        for pattern, style in _STYLES.items():
            picture.highlight_regex(pattern, style)
        yield picture
        yield Text(self._legend(), style="dim")

    def _legend(self) -> str:
        schedule = self.timeline.schedule
        kinds = {action.kind for row in schedule.actions for action in row}
        words = [text for kind, text in _WORDS.items() if kind in kinds]
        if schedule.stages > schedule.devices:
            words.append("capitals: every second stage of a device")
        named = any(not name.endswith(f":{row}") for row, name in enumerate(self.devices))
        lines = ", ".join(f"{row} {name}" for row, name in enumerate(self.devices))
        return f"One line a device{f' ({lines})' if named else ''}. {'; '.join([*words, 'dots: idle'])}."


def drawn_timeline(
    timeline: Timeline, title: str = "Timeline of one step", devices: Sequence[str] = ()
) -> DrawnTimeline:
    """Return a picture of a simulated or measured timeline, to print with :func:`show`.

    Args:
        timeline: start and end of each action.
        title: stands above it.
        devices: their names, one a line of the picture.
    """
    return DrawnTimeline(timeline, title, tuple(devices))
