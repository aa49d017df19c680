"""Data parallelism: so many copies of a schedule side by side, each on devices of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..core.action import Action, ScheduleError
from ..core.schedule import Schedule, without_micro_batches
from .passes import insert_reduce_grad


def data_parallel(schedule: Schedule, copies: int, micro_batches: int | None = None) -> Schedule:
    """Return a schedule that runs so many copies of one side by side, and then sums their gradients.

    Device d of copy k is device k * devices + d, stage s of it has the number k * stages + s, and it runs the
    micro-batches k, k + copies, k + 2 * copies and so on of the whole step. Behind the last backward of a device
    stands a REDUCE_GRAD for each of its stages, which waits for that stage in all copies; where the schedule has
    reductions, they stay where they are.

    micro_batches: of the whole step; left out, `copies` times those of the schedule. Of fewer, the last ones of
        some copies are left out, so that two copies never differ by more than one.

    Raises ScheduleError for less than one copy, an asynchronous schedule, or more micro-batches than that.

    >>> from schedules import build
    >>> print(data_parallel(build("1f1b", devices=1, micro_batches=2), copies=2).to_csv(), end="")
    0F0,0B0,0F2,0B2,0REDUCE_GRAD
    1F1,1B1,1F3,1B3,1REDUCE_GRAD
    """
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        raise ScheduleError(f"a schedule has 1 copy at least, got copies={copies!r}")
    most = copies * schedule.micro_batches
    count = most if micro_batches is None else micro_batches
    if not 1 <= count <= most:
        raise ScheduleError(
            f"{copies} copies of {schedule.name} with {schedule.micro_batches} micro-batches have 1 to {most}, "
            f"got micro_batches={count}"
        )
    if copies > 1:
        if schedule.versions:
            raise ScheduleError(
                f"{schedule.name} is asynchronous: its copies would have to agree on their weights within a step"
            )
        schedule = insert_reduce_grad(_side_by_side(schedule, copies))
    return without_micro_batches(schedule, count)


def _side_by_side(schedule: Schedule, copies: int) -> Schedule:
    return replace(
        schedule,
        actions=tuple(
            tuple(_of_copy(schedule, copy, copies, row)) for copy in range(copies) for row in schedule.actions
        ),
        device_of=tuple(
            copy * schedule.devices + device for copy in range(copies) for device in schedule.device_of
        ),
        micro_batches=copies * schedule.micro_batches,
        replicas=copies * schedule.replicas,
    )


def _of_copy(schedule: Schedule, copy: int, copies: int, row: tuple[Action, ...]) -> Iterator[Action]:
    """The actions of a device in one of the copies."""
    first = copy * schedule.stages
    for action in row:
        if action.parts:
            yield Action.overlap(*_of_copy(schedule, copy, copies, action.parts))
        elif action.micro_batch is None:
            yield action._replace(stage=first + action.stage)
        else:
            yield action._replace(stage=first + action.stage, micro_batch=action.micro_batch * copies + copy)
