"""TimedSchedule: a schedule with a start and an end for each action, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import gt

from .action import Action, ScheduleError
from .schedule import Schedule
from .transfer import Transfer


@dataclass(frozen=True)
class TimedSchedule:
    """A start and an end for each action of a schedule. `Timeline` adds analysis and pictures.

    Args:
        schedule: the actions, without overlapped pairs.
        starts: seconds, one sequence per device, one number per action, in the order of the schedule. Any origin of
            time will do.
        ends: likewise.
        peak_bytes: the most stash that each device holds; empty where it is not known.
        transfers: the messages between devices; a simulated timeline has those that take time.

    Raises:
        ScheduleError: starts and ends do not match the actions, an action ends before it starts, or the schedule has
            overlapped pairs.
    """

    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    peak_bytes: tuple[float, ...] = ()
    transfers: Sequence[Transfer] = ()

    def __post_init__(self) -> None:
        """Refuse times that do not belong to the actions."""
        if self.schedule.leaves is not self.schedule.actions:
            raise ScheduleError(
                f"{self.schedule.name} has overlapped pairs: a timeline has the times of each of their actions, "
                "build it with split_overlaps(schedule)"
            )
        lengths = [len(row) for row in self.schedule.actions]
        for what, rows in (("starts", self.starts), ("ends", self.ends)):
            if [len(row) for row in rows] != lengths:
                raise ScheduleError(
                    f"{what} are given for {[len(row) for row in rows]} actions, there are {lengths}"
                )
        for device, (starts, ends) in enumerate(zip(self.starts, self.ends, strict=True)):
            if any(map(gt, starts, ends)):
                action, start, end = next(each for each in self.row(device) if each[1] > each[2])
                raise ScheduleError(f"{action} ends at {end}, before it starts at {start}")

    def row(self, device: int) -> Iterator[tuple[Action, float, float]]:
        """Return the actions of a device, each with its start and end."""
        return zip(self.schedule.actions[device], self.starts[device], self.ends[device], strict=True)

    @property
    def rows(self) -> list[Iterator[tuple[Action, float, float]]]:
        """The actions of each device, each with its start and end."""
        return list(map(self.row, range(self.schedule.devices)))

    @cached_property
    def origin(self) -> float:
        """The first start anywhere, in seconds."""
        return min(map(min, filter(None, self.starts)), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end anywhere."""
        return max(map(max, filter(None, self.ends)), default=0.0) - self.origin

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds for which each device computes."""
        return tuple(sum(end - start for _, start, end in row) for row in self.rows)

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

    def span(self, action: Action) -> tuple[float, float]:
        """Return start and end of an action.

        Raises:
            ScheduleError: the schedule has no such action.
        """
        if action not in self._spans:
            raise ScheduleError(f"{self.schedule.name} has no action {action}")
        return self._spans[action]

    @cached_property
    def short_action(self) -> float:
        """Seconds of a short action: three quarters of those that take time are longer."""
        lengths = sorted(end - start for row in self.rows for _, start, end in row if end > start)
        return lengths[len(lengths) // 4] if lengths else 0.0

    @cached_property
    def _spans(self) -> dict[Action, tuple[float, float]]:
        return {action: (start, end) for row in self.rows for action, start, end in row}

    def _bubble(self, seconds: float) -> float:
        return 1 - sum(self.busy) / (self.schedule.devices * seconds) if seconds else 0.0
