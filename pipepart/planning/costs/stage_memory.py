"""What stages keep for their backwards, with and without making some of it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import schedules

from ..stage_plan import Recompute

RecomputeChoice = Literal["auto", "never", "except-last", "always"]

# What a stage may do, the quickest first and the one that keeps least last.
MODES: Mapping[str, tuple[Recompute, ...]] = {
    "auto": ("never", "except-last", "always"),
    "never": ("never",),
    "except-last": ("except-last",),
    "always": ("always",),
}

# [candidates, 3]: micro-batches kept as full stash, as input only, and awaiting W, at each point that can be the peak.
PeakCandidates = NDArray[np.int64]


def with_recompute(bare: schedules.Schedule, modes: Sequence[Recompute]) -> schedules.Schedule:
    """The schedule with the forwards that the stages of the model run again; of several copies each as the first."""
    count = bare.micro_batches
    for mode, parts in (("always", range(count)), ("except-last", range(count - 1))):
        again = [stage for stage in range(bare.stages) if modes[stage % len(modes)] == mode]
        if again:
            bare = schedules.insert_recompute(bare, again, parts)
    return bare


class StashCounts:
    """What the stages of a schedule keep for their backwards at once, at most.

    Args:
        schedule: with the forwards that its stages run again; of overlapped pairs one runs after the other.

    Attributes:
        by_device: the moments of each device, see :func:`schedules.peak_candidates`.
        by_stage: those of each stage alone: so many stashes, so many inputs, and so many times what waits for W.
        weighed: of these numbers, those that are not always 0: all three, or two where no backward is split.
        older: how many versions of its weights each stage keeps besides the newest; none unless it is asynchronous.
        older_by_left: the same by the number of stages from one to the end; entry 0 is unused.
    """

    def __init__(self, schedule: schedules.Schedule) -> None:
        self.by_device: tuple[PeakCandidates, ...] = schedules.peak_candidates(
            schedules.split_overlaps(schedule)
        )
        alone = {
            stage: moments[:, column]
            for device, moments in enumerate(self.by_device)
            for column, stage in enumerate(schedule.stages_of(device))
        }
        self.by_stage: tuple[PeakCandidates, ...] = tuple(alone[stage] for stage in range(schedule.stages))
        self.older = tuple(count - 1 for count in schedules.live_versions(schedule))
        self.older_by_left = np.array([0, *reversed(self.older)])
        self.weighed = 3 if any(moments[:, 2].any() for moments in self.by_stage) else 2
        most = max(map(len, self.by_stage))
        table = np.array([np.resize(own, (most, 3)) for own in reversed(self.by_stage)], dtype=np.float64)
        table = table[:, :, : self.weighed]
        self._different, inverse = np.unique(table, axis=0, return_inverse=True)
        self._of_left = np.r_[0, inverse.reshape(-1)]

    def bytes_of(self, stage: int, sizes: Sequence[int]) -> int:
        """What one stage keeps whose stash, input and what waits for W are of these sizes."""
        return int((self.by_stage[stage] @ sizes).max())

    def bytes_by_left(self, sizes: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """The same for several of each (columns), by the number of stages from one to the end (rows); row 0 is unused.

        The last of the sizes is left out where nothing waits.
        """
        found = self._different @ np.stack(sizes)
        return found.max(axis=1)[self._of_left]
