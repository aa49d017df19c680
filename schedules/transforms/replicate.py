"""Data parallelism: replicas of a pipeline schedule, each on separate devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..core.action import Action, ScheduleError
from ..core.schedule import Schedule, without_micro_batches
from .passes import insert_reduce_grad


def replicate(schedule: Schedule, replicas: int, micro_batches: int | None = None) -> Schedule:
    """Return a schedule that runs `replicas` copies of `schedule` on separate devices and sums their gradients.

    Device d of replica k becomes device k * devices + d, and stage s becomes stage k * stages + s. Replica k runs
    the micro-batches k, k + replicas, k + 2 * replicas and so on. Each device ends with a REDUCE_GRAD for each of
    its stages, which waits for that stage on all replicas. A schedule that has reductions keeps them where they are.

    Args:
        schedule: of one replica; synchronous.
        replicas: how many.
        micro_batches: of the whole step; left out, `replicas` times those of the schedule. If fewer are given, the
            last ones of some replicas are left out; two replicas never differ by more than one.

    Raises:
        ScheduleError: `replicas` is less than 1, there are too many micro-batches, or the schedule is asynchronous.

    >>> from schedules import build
    >>> print(replicate(build("1f1b", devices=1, micro_batches=2), replicas=2).to_csv(), end="")
    0F0,0B0,0F2,0B2,0REDUCE_GRAD
    1F1,1B1,1F3,1B3,1REDUCE_GRAD
    """
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ScheduleError(f"replicas must be a number of at least 1, got replicas={replicas!r}")
    most = replicas * schedule.micro_batches
    count = most if micro_batches is None else micro_batches
    if not 1 <= count <= most:
        raise ScheduleError(
            f"{replicas} replicas of {schedule.name} with {schedule.micro_batches} micro-batches run 1 to {most}, "
            f"got micro_batches={count}"
        )
    if replicas > 1:
        if schedule.versions:
            raise ScheduleError(
                f"{schedule.name} is asynchronous: replicas would have to agree on their weights within a step"
            )
        schedule = insert_reduce_grad(_side_by_side(schedule, replicas))
    return without_micro_batches(schedule, count)


def _side_by_side(schedule: Schedule, replicas: int) -> Schedule:
    return replace(
        schedule,
        actions=tuple(
            tuple(_of_replica(schedule, replica, replicas, row))
            for replica in range(replicas)
            for row in schedule.actions
        ),
        device_of=tuple(
            replica * schedule.devices + device
            for replica in range(replicas)
            for device in schedule.device_of
        ),
        micro_batches=replicas * schedule.micro_batches,
        replicas=replicas * schedule.replicas,
    )


def _of_replica(schedule: Schedule, replica: int, replicas: int, row: tuple[Action, ...]) -> Iterator[Action]:
    """Renumber the actions of one device for one of the replicas."""
    first = replica * schedule.stages
    for action in row:
        if action.parts:
            yield Action.overlap(*_of_replica(schedule, replica, replicas, action.parts))
        elif action.micro_batch is None:
            yield action._replace(stage=first + action.stage)
        else:
            yield action._replace(
                stage=first + action.stage, micro_batch=action.micro_batch * replicas + replica
            )
