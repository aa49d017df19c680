"""Adds the edges of skip connections, messages that pass over stages, to the edges of a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..core.action import Kind
from ..core.costs import StageCosts
from ..core.dependencies import Dependencies
from ..core.schedule import Schedule


def with_skips(found: Dependencies, schedule: Schedule, costs: StageCosts) -> Dependencies:
    """Return the edges of a schedule with those of ``costs.skips``: from F to F, and back from B or I to B or I.

    Of edges from one action, that to the nearest stage comes first: the order in which their messages are sent.
    """
    if not costs.skips:
        return found
    forward, backward = _places(found, schedule, Kind.F), _places(found, schedule, Kind.B, Kind.I)
    columns: list[list[np.ndarray]] = [[found.source, found.target, found.source_stage, found.target_stage]]
    for source, target, _ in sorted(_skips(schedule, costs), key=lambda skip: skip[1] - skip[0]):
        for place, one, other in ((forward, source, target), (backward, target, source)):
            made, used = place[one], place[other]
            both = (made >= 0) & (used >= 0)
            stages = np.full((2, int(both.sum())), [[one], [other]])
            columns.append([made[both], used[both], *stages])
    names = ("source", "target", "source_stage", "target_stage")
    joined = dict(zip(names, map(np.concatenate, zip(*columns, strict=True)), strict=True))
    is_copy = np.pad(found.is_copy, (0, joined["source"].size - found.is_copy.size))
    return replace(found, is_copy=is_copy, **joined)


def messages(schedule: Schedule, costs: StageCosts) -> Iterator[tuple[int, int, float]]:
    """Yield (earlier stage, later stage, bytes) for each pair of stages that exchange outputs and gradients."""
    for stage in range(schedule.stages):
        following = schedule.next_stage(stage)
        if following is not None:
            yield stage, following, costs.message_bytes[stage]
    yield from _skips(schedule, costs)


def _skips(schedule: Schedule, costs: StageCosts) -> list[tuple[int, int, float]]:
    """Return ``costs.skips`` for every copy of the model."""
    return [
        (first + source, first + target, size)
        for first in range(0, schedule.stages, schedule.model_stages)
        for source, target, size in costs.skips
    ]


def _places(found: Dependencies, schedule: Schedule, *kinds: Kind) -> np.ndarray:
    """Return the action of these kinds of each stage and micro-batch; -1 if there is none."""
    rows = np.flatnonzero(found.is_kind(*kinds))
    place = np.full((schedule.stages, schedule.micro_batches), -1)
    place[found.stage[rows], found.micro_batch[rows]] = found.owner[rows]
    return place
