"""Timeline: a start and an end for each action of a schedule, simulated or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core.costs import StageCosts
from ..core.timed_schedule import TimedSchedule
from ..pictures.draw import Drawn, Panel
from ..pictures.text import draw
from .read_trace import from_trace
from .waits import Idle, idle
from .write_trace import side_by_side


@dataclass(frozen=True)
class Timeline(TimedSchedule, Drawn):
    """A start and an end for each action of a schedule, simulated from costs or measured.

    Arguments and errors are those of `TimedSchedule`.
    """

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The idle time of each device, by cause."""
        return idle(self)

    def draw(self, width: int | None = 100) -> str:
        """Return the timeline as text, to scale: one line per device, ``.`` where it idles.

        Each action shows its micro-batch, filled up with the letter of its kind, in capitals on every second chunk of
        the device. Where there is no room for the number, its last digit is shown.

        Args:
            width: characters per line. A timeline that needs more goes on below, after an empty line, up to four
                times. With None a line is as long as it has to be.

        >>> from schedules import StageCosts, build, simulate
        >>> costs = StageCosts([1, 1], [1, 1], [1, 1])
        >>> print(simulate(build("1f1b", devices=2, micro_batches=3), costs).draw(width=39))
        0 |0ff1ff...0bbbbb2ff1bbbbb...2bbbbb
        1 |...0ff0bbbbb1ff1bbbbb2ff2bbbbb...
        """
        return draw(self, width)

    def panels(self, labels: Sequence[str] | None = None) -> list[Panel]:
        """Return the timeline as the only panel of a picture."""
        return [Panel("", self, labels)]

    def to_trace(
        self, labels: Sequence[str] | None = None, costs: StageCosts | None = None
    ) -> dict[str, Any]:
        """Return the timeline as a Chrome trace, for json.dump; ui.perfetto.dev and chrome://tracing read it.

        The timeline is a process with a thread for each device. It has a track for the messages of each edge, a counter
        of the micro-batches in flight on each device, and arrows from the action that makes a message to the one that
        takes it.

        Args:
            labels: the names of the devices; "device 0", "device 1", ... if not given.
            costs: of the stages, for a counter of the bytes that each device stashes.
        """
        return side_by_side({self.schedule.name: self}, labels, costs)

    @staticmethod
    def from_trace(trace: Mapping[str, Any]) -> Timeline:
        """Return the timeline written by `to_trace`, or the first timeline written by `side_by_side`.

        Raises:
            ScheduleError: the trace was written by neither.
        """
        return Timeline(**from_trace(trace))
