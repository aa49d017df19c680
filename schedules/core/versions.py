"""Weight versions of asynchronous schedules: the versions kept at one time and the gradients that each step applies."""

from __future__ import annotations

from .action import Kind
from .schedule import Schedule


def older_versions(schedule: Schedule, stage: int) -> tuple[frozenset[int], ...]:
    """Return, for each optimizer step of a stage, the older weight versions that are still needed after it.

    Version v is the weights after v steps. A version is needed while actions of a micro-batch that uses it are left.
    A synchronous schedule has none.

    >>> from schedules import build
    >>> [sorted(needed) for needed in older_versions(build("pipedream", devices=3, micro_batches=4), 0)]
    [[0], [0, 1], [1], []]
    """
    if not schedule.versions:
        return ()
    leaves = [leaf for leaf in schedule.leaves[schedule.device_of[stage]] if leaf.stage == stage]
    steps = sum(leaf.kind is Kind.OPT_STEP for leaf in leaves)
    needed: set[int] = set()
    versions = []
    for leaf in reversed(leaves):
        if leaf.kind is Kind.OPT_STEP:
            needed = {version for version in needed if version < steps}
            versions.append(frozenset(needed))
            steps -= 1
        elif leaf.micro_batch is not None:
            needed.add(schedule.versions[stage][leaf.micro_batch])
    return tuple(reversed(versions))


def live_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return, per stage, the largest number of weight versions kept at the same time.

    >>> from schedules import build
    >>> live_versions(build("pipedream", 4, 8)), live_versions(build("pipedream-2bw", 4, 8))
    ((4, 3, 2, 1), (2, 2, 2, 2))
    """
    return tuple(
        1 + max(map(len, older_versions(schedule, stage)), default=0) for stage in range(schedule.stages)
    )


def stepped_together(schedule: Schedule) -> tuple[range, ...]:
    """Return the micro-batches whose gradients each optimizer step applies; a synchronous schedule has one step.

    >>> from schedules import build
    >>> stepped_together(build("pipedream-2bw", devices=2, micro_batches=4))
    (range(0, 2), range(2, 4))
    """
    if not schedule.versions:
        return (range(schedule.micro_batches),)
    last = [
        action.micro_batch
        for action in schedule.actions[schedule.device_of[0]]
        if action.kind is Kind.OPT_STEP and action.stage == 0 and action.micro_batch is not None
    ]
    return tuple(
        range(start, end + 1) for start, end in zip([0, *(number + 1 for number in last)], last, strict=False)
    )
