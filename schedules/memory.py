"""How much a schedule keeps between forwards and backwards; a matter of order alone, not of time."""

from __future__ import annotations

import numpy as np

from .action import Kind
from .costs import StageCosts
from .dependencies import Dependencies, dependencies
from .schedule import Schedule


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, per stage, the peak number of micro-batches whose forward has begun and backward not ended.

    A micro-batch is in flight until its B or W has ended.

    >>> from schedules import build
    >>> in_flight(build("1f1b", devices=4, micro_batches=8))
    (4, 3, 2, 1)
    """
    found = dependencies(schedule)
    change = found.is_kind(Kind.F).astype(np.int64) - found.is_kind(Kind.B, Kind.W)
    peaks = []
    for stage in range(schedule.stages):
        rows = found.stage == stage
        peaks.append(_peak(change[rows], found.owner[rows])[0])
    return tuple(int(peak) for peak in peaks)


def stash_peaks(schedule: Schedule, costs: StageCosts, found: Dependencies) -> list[tuple[float, int]]:
    """Return, per device, the peak bytes of stash and the position of the action that reaches it."""
    change = _stash_changes(found, costs)
    bounds = np.searchsorted(found.owner, found.offsets)
    return [
        _peak(change[first:last], found.owner[first:last] - offset)
        for first, last, offset in zip(bounds, bounds[1:], found.offsets, strict=False)
    ]


def _stash_changes(found: Dependencies, costs: StageCosts) -> np.ndarray:
    """Bytes that each leaf adds (when it starts) or releases (when it ends)."""
    stash = np.asarray(costs.stash_bytes)[found.stage]
    weight = np.asarray(costs.weight_stash_bytes)[found.stage]
    boundary = np.asarray(costs.boundary_bytes)[found.stage]
    recomputes = found.is_kind(Kind.RECOMPUTE)
    recomputed = recomputes
    if recomputes.any():
        key = found.stage * (found.micro_batch.max() + 1) + found.micro_batch
        recomputed = np.isin(key, key[recomputes])
    change = np.zeros(found.code.size)
    for kind, bytes_changed in (
        (Kind.F, np.where(recomputed, boundary, stash)),
        (Kind.RECOMPUTE, stash - boundary),
        (Kind.B, -stash),
        (Kind.I, weight - stash),
        (Kind.W, -weight),
    ):
        rows = found.is_kind(kind)
        change[rows] = bytes_changed[rows]
    return change


def _peak(change: np.ndarray, position: np.ndarray) -> tuple[float, int]:
    """The peak of the running sum, and where: each action adds when it starts and releases when it ends."""
    if not change.size:
        return 0, 0
    added, released = np.maximum(change, 0), np.minimum(change, 0)
    ends_action = np.append(position[1:] != position[:-1], True)
    released_before = np.cumsum(released) - released
    starts = np.append(0, np.flatnonzero(ends_action)[:-1] + 1)
    within = np.cumsum(ends_action) - ends_action
    level = np.cumsum(added) + released_before[starts][within]
    where = int(np.argmax(level))
    return level[where].item(), int(position[where])
