"""A timeline drawn as text, as wide as there is room."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from schedules import Timeline

from ..units import format_seconds

# A line in a file need not be longer to be legible.
_WIDEST = 140
_STYLES = {r"\d*f+": "cyan", r"\d*b+": "magenta", r"\d*i+": "green", r"\d*w+": "yellow", r"\.+": "dim"}


@dataclass(frozen=True)
class DrawnTimeline:
    """The picture under a title and over its legend."""

    timeline: Timeline
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{self.title}, {format_seconds(self.timeline.makespan)}", style="bold")
        picture = Text(
            self.timeline.draw(width=min(options.max_width, _WIDEST)), no_wrap=True, overflow="ignore"
        )
        for pattern, style in _STYLES.items():
            picture.highlight_regex(pattern, style)
        yield picture
        yield Text(
            "One line a device. 0f: forward of micro-batch 0; 0b: its backward; dots: idle.", style="dim"
        )


def drawn_timeline(timeline: Timeline, title: str = "Timeline of one step") -> DrawnTimeline:
    """A simulated or measured timeline to print."""
    return DrawnTimeline(timeline, title)
