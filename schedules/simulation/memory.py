"""Counts the stashes that a schedule keeps between forwards and backwards, from its order alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..core.action import Kind
from ..core.costs import StageCosts
from ..core.dependencies import Dependencies, dependencies
from ..core.schedule import Schedule
from ..core.stash import count_changes, stash_changes


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, per stage, the peak number of micro-batches between the start of F and the end of the backward.

    A micro-batch is in flight until its B or W has ended.

    >>> from schedules import build
    >>> in_flight(build("1f1b", devices=4, micro_batches=8))
    (4, 3, 2, 1)
    """
    peaks = [0] * schedule.stages
    for device, moments in enumerate(peak_candidates(schedule)):
        for stage, peak in zip(schedule.stages_of(device), moments.sum(axis=2).max(axis=0), strict=True):
            peaks[stage] = int(peak)
    return tuple(peaks)


def peak_candidates(schedule: Schedule) -> tuple[np.ndarray, ...]:
    """Return, per device, the stash counts of its stages at each moment that can be the device's memory peak.

    A moment is left out if another one has at least as much of everything. So for any sizes, the peak of a device is
    the largest weighted sum of one of its moments, and the peak of a stage the largest of its own part.

    Returns:
        One array per device, of shape (moments, stages of the device, 3). The three numbers count micro-batches: with
        their full stash, from F (or RECOMPUTE) to the end of B or I; with their input alone, from F to RECOMPUTE; and
        with what W needs, from the end of I to the end of W. A stash that is offloaded counts as input alone from the
        end of OFFLOAD to the start of RELOAD.

    >>> from schedules import build, insert_recompute
    >>> peak_candidates(insert_recompute(build("gpipe", devices=1, micro_batches=4)))[0].tolist()
    [[[0, 4, 0]], [[1, 3, 0]]]
    """
    found = dependencies(schedule)
    changes = np.add(*count_changes(found))
    parts = 3 if found.is_kind(Kind.I).any() else 2  # nothing waits for W where there is none
    tables = []
    for device, (first, last) in enumerate(_spans(found)):
        stages = schedule.stages_of(device)
        if first == last:
            tables.append(np.zeros((1, len(stages), 3), dtype=np.int64))
            continue
        column = np.searchsorted(stages, found.stage[first:last])
        change = np.zeros((last - first, len(stages), parts), dtype=np.int64)
        change[np.arange(last - first), column] = changes[first:last, :parts]
        adds = found.is_kind(Kind.F, Kind.RECOMPUTE, Kind.RELOAD)[first:last, None, None]
        levels = _levels(np.where(adds, change, 0), np.where(adds, 0, change), found.owner[first:last])
        if parts == 3:  # what waits after I may be more than the stash before it
            levels = np.concatenate(
                [levels, np.cumsum(change, axis=0)[_ends_action(found.owner[first:last])]]
            )
        tables.append(np.pad(largest(levels), ((0, 0), (0, 0), (0, 3 - parts))))
    return tuple(tables)


def stash_peaks(schedule: Schedule, costs: StageCosts, found: Dependencies) -> list[tuple[float, int]]:
    """Return, per device, the peak stash bytes and the position of the action at the peak."""
    change = stash_changes(found, costs)
    return [
        _peak(change[first:last], found.owner[first:last] - offset)
        for (first, last), offset in zip(_spans(found), found.offsets, strict=False)
    ]


def _spans(found: Dependencies) -> list[tuple[int, int]]:
    """Return the span of leaves of each device, as first and last + 1."""
    return list(pairwise(np.searchsorted(found.owner, found.offsets).tolist()))


def _peak(change: np.ndarray, position: np.ndarray) -> tuple[float, int]:
    """Return the peak of the running sum, and its position."""
    if not change.size:
        return 0, 0
    level = _levels(np.maximum(change, 0), np.minimum(change, 0), position)
    where = int(np.argmax(level))
    return level[where].item(), int(position[where])


def _levels(added: np.ndarray, released: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the running sum at each leaf; each action adds when it starts and releases when it ends."""
    ends_action = _ends_action(position)
    released_before = np.cumsum(released, axis=0) - released
    starts = np.append(0, np.flatnonzero(ends_action)[:-1] + 1)
    within = np.cumsum(ends_action) - ends_action
    return np.cumsum(added, axis=0) + released_before[starts][within]


def _ends_action(position: np.ndarray) -> np.ndarray:
    """Return for each leaf whether it is the last of its action."""
    return np.append(position[1:] != position[:-1], True)


def largest(levels: np.ndarray) -> np.ndarray:
    """Return the Pareto front of ``levels``: the distinct entries that no other entry dominates."""
    rest = np.unique(levels.reshape(len(levels), -1), axis=0)
    kept = []
    while len(rest):
        top = rest[rest.sum(axis=1).argmax()]  # nothing that is larger everywhere has a smaller sum
        kept.append(top)
        rest = rest[(rest > top).any(axis=1)]
    return np.array(kept, dtype=np.int64).reshape(len(kept), *levels.shape[1:])
