"""Timeline: a start and an end for each action of a schedule, simulated or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import gt
from typing import Any

from ..core.action import COMMUNICATION, Action, ScheduleError
from ..core.costs import StageCosts
from ..core.schedule import Schedule
from ..core.transfer import Transfer
from ..pictures.cell import panels_html
from ..pictures.draw import Drawn, Panel
from .ascii import draw
from .chrome_trace import Traced, to_trace
from .critical_path import critical_path
from .idle import Idle, idle
from .read_trace import from_trace


@dataclass(frozen=True)
class Timeline(Drawn):
    """A start and an end for each action of a schedule, simulated from costs or measured.

    Args:
        schedule: the actions.
        starts: seconds, one sequence per device, one number per action, in the order of the schedule. Any origin of
            time will do.
        ends: likewise.
        peak_bytes: the most stash that each device holds; empty where it is not known.
        peak_at: the start, in seconds, of the action that reaches it; empty where it is not known.
        transfers: the messages between devices; a simulated timeline has those that take time.

    Raises:
        ScheduleError: starts and ends do not match the actions, or an action ends before it starts.
    """

    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    peak_bytes: tuple[float, ...] = ()
    peak_at: tuple[float, ...] = ()
    transfers: Sequence[Transfer] = ()

    def __post_init__(self) -> None:
        """Refuse times that do not belong to the actions."""
        lengths = [len(row) for row in self.schedule.actions]
        for what, rows in (("starts", self.starts), ("ends", self.ends)):
            if [len(row) for row in rows] != lengths:
                raise ScheduleError(
                    f"{what} are given for {[len(row) for row in rows]} actions, there are {lengths}"
                )
        for device, (starts, ends) in enumerate(zip(self.starts, self.ends, strict=True)):
            if any(map(gt, starts, ends)):
                position = next(
                    at for at, (start, end) in enumerate(zip(starts, ends, strict=True)) if start > end
                )
                action = self.schedule.actions[device][position]
                raise ScheduleError(
                    f"{action} ends at {ends[position]}, before it starts at {starts[position]}"
                )

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end anywhere."""
        return max(map(max, filter(None, self.ends)), default=0.0) - self._origin

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds for which each device computes; messages do not count."""
        return tuple(
            sum(end - start for action, start, end in self._row(device) if action.kind not in COMMUNICATION)
            for device in range(self.schedule.devices)
        )

    @property
    def bubble(self) -> float:
        """The idle part of the makespan, mean over the devices: 0 to 1."""
        return self._bubble(self.makespan)

    @property
    def zero_bubble(self) -> float:
        """The bubble if each device starts its next step as soon as it has finished this one.

        The cost of a step is then the longest time between the first start and the last end of one device,
        as in Qi et al. 2024, arXiv 2401.10241, §5.3; with equal stages, 1 - busy / cost.
        """
        return self._bubble(self.zero_bubble_seconds)

    @property
    def zero_bubble_seconds(self) -> float:
        """The longest time between the first start and the last end of one device."""
        return max(
            (max(ends) - min(starts) for starts, ends in zip(self.starts, self.ends, strict=True) if ends),
            default=0.0,
        )

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The idle time of each device, by phase and by cause."""
        return idle(self.schedule, self.starts, self.ends, self.transfers)

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions that determines the makespan, first to last: each action waits for the one before it."""
        return critical_path(self.schedule, self.starts, self.ends, self.transfers)

    def span(self, action: Action) -> tuple[float, float]:
        """Return start and end of an action, or of the overlapped action that it is part of.

        Raises:
            ScheduleError: the schedule has no such action.
        """
        if action not in self._place:
            raise ScheduleError(f"{self.schedule.name} has no action {action}")
        device, position = self._place[action]
        return self.starts[device][position], self.ends[device][position]

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
        return draw(self.schedule, self.starts, self.ends, width)

    def panel(self, name: str = "", labels: Sequence[str] | None = None) -> Panel:
        """Return the timeline as a panel of a picture, with a title and device names."""
        return Panel(name, self.schedule, self.starts, self.ends, self.makespan, self.bubble, labels)

    def panels(self, labels: Sequence[str] | None = None) -> list[Panel]:
        """Return the timeline as the only panel of a picture."""
        return [self.panel(labels=labels)]

    def _repr_html_(self) -> str:
        """Show the timeline in a notebook; of more than 16 devices, the first ones."""
        return panels_html(self.panels())

    def to_trace(
        self, labels: Sequence[str] | None = None, costs: StageCosts | None = None
    ) -> dict[str, Any]:
        """Return the timeline as a Chrome trace, for json.dump; ui.perfetto.dev and chrome://tracing read it.

        The timeline is a process with a thread for each device, and further threads for sends and receives that are
        actions. It has a track for the messages of each edge, a counter of the micro-batches in flight on each device,
        and arrows from the action that makes a message to the one that takes it.

        Args:
            labels: the names of the devices; "device 0", "device 1", ... if not given.
            costs: of the stages, for a counter of the bytes that each device stashes.
        """
        return to_trace({self.schedule.name: self.traced(labels, costs)})

    def traced(self, labels: Sequence[str] | None = None, costs: StageCosts | None = None) -> Traced:
        """Return the timeline as input for `chrome_trace`."""
        costs = costs and costs.for_schedule(self.schedule)
        return Traced(
            self.schedule,
            self.starts,
            self.ends,
            self.peak_bytes,
            self.peak_at,
            self.transfers,
            labels,
            costs,
        )

    @staticmethod
    def from_trace(trace: Mapping[str, Any]) -> Timeline:
        """Return the timeline written by `to_trace`, or the first timeline written by `side_by_side`.

        Raises:
            ScheduleError: the trace was written by neither.
        """
        read = from_trace(trace)
        return Timeline(
            read.schedule, read.starts, read.ends, tuple(read.peak_bytes), tuple(read.peak_at), read.transfers
        )

    @property
    def _origin(self) -> float:
        return min(map(min, filter(None, self.starts)), default=0.0)

    @cached_property
    def _place(self) -> dict[Action, tuple[int, int]]:
        return {
            each: (device, position)
            for device, row in enumerate(self.schedule.actions)
            for position, action in enumerate(row)
            for each in {action, *action.leaves}
        }

    def _row(self, device: int):
        return zip(self.schedule.actions[device], self.starts[device], self.ends[device], strict=True)

    def _bubble(self, seconds: float) -> float:
        return 1 - sum(self.busy) / (self.schedule.devices * seconds) if seconds else 0.0
