"""Computes the peak memory of a device, for cut searches, predictions and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import schedules

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The micro-batches for which a stage drops its stash and repeats its forward right before the backward.
Recompute = Literal["never", "except-last", "always"]
RecomputeChoice = Literal["auto", "never", "except-last", "always"]
# Whether a stage moves its stash to host memory between forward and backward.
Offload = Literal["never", "stash"]
OffloadChoice = Literal["auto", "never", "stash"]
# What a stage does with its stash: keep it for all micro-batches ("never"), recompute it, or offload it.
Mode = Literal["never", "except-last", "always", "offload"]

RECOMPUTES: frozenset[Mode] = frozenset({"except-last", "always"})
ModeChoice = Literal["auto", "never", "except-last", "always", "offload", "stash"]

# The modes that a stage may use for each choice: the fastest mode first, the mode with the smallest memory last.
# Whether recompute or offload is faster depends on the cut, so they are tried separately.
MODE_SETS: Mapping[ModeChoice, tuple[Mode, ...]] = {
    "auto": ("never", "except-last", "always"),
    "never": ("never",),
    "except-last": ("except-last",),
    "always": ("always",),
    "offload": ("never", "offload"),
    "stash": ("offload",),
}


# Columns of the tables of counts and sizes. The bytes of a device at a moment are the sum of counts times sizes.
# Per micro-batch: the full stash, only the input, and the memory that W still needs.
STASH, INPUT, DEFERRED = range(3)
KEPT = slice(0, 3)  # the three columns above
MESSAGES = slice(3, 5)  # waiting messages: the input, and the gradient of the output
WORKSPACE = slice(5, 10)  # of the running action: F, B, I, W, or a B that allocates the weight gradients
# Weight gradients: of further replicas, or, with a count of -1, gradients that are not allocated yet.
VERSION = 10
COLUMNS = 11
FIXED = 2  # columns in front of these, in tables of sizes: static bytes and one more version of the weights


@dataclass(frozen=True)
class StageSizes:
    """Bytes of stages.

    Attributes:
        table: static, version, then the sizes for the columns of counts: [cuts, stages of a device, 2 + COLUMNS].
    """

    table: Floats

    @property
    def static(self) -> Floats:
        """Parameters, gradients, optimizer state and buffers: [cuts, stages]."""
        return self.table[..., 0]

    @property
    def version(self) -> Floats:
        """One more version of the trained weights (asynchronous schedules), or the gradients of a replica."""
        return self.table[..., 1]

    @property
    def counted(self) -> Floats:
        """The sizes for the columns of counts: [cuts, stages, COLUMNS]."""
        return self.table[..., FIXED:]

    @property
    def per_micro_batch(self) -> Floats:
        """The full stash, only the input (before a recompute), and what W still needs after I: [cuts, stages, 3]."""
        return self.counted[..., KEPT]

    @property
    def messages(self) -> Floats:
        """The input, and the gradient of the output: [cuts, stages, 2]."""
        return self.counted[..., MESSAGES]

    @property
    def transient(self) -> Floats:
        """The most that F, B, I, W, and a B that allocates the weight gradients need besides: [cuts, stages, 5]."""
        return self.counted[..., WORKSPACE]

    def with_waiting(self, waiting: Floats | Ints) -> StageSizes:
        """Return the sizes with more bytes, [cuts, stages], for each micro-batch in flight."""
        table = self.table.copy()
        table[..., [FIXED + STASH, FIXED + INPUT]] += waiting[..., None]
        return StageSizes(table)


def device_peak_bytes(sizes: StageSizes, counts: Ints, older: Ints) -> Floats:
    """Return the peak memory of a device for several schedules and several cuts: [schedules, cuts].

    The formula, summed over the stages of the device::

        sum(static + older * version) + max over moments of
            sum(stashes + inputs only + deferred + waiting messages) + transient of the running action
            - weight gradients that are not allocated yet

    Args:
        sizes: the sizes of the device's stages, one row per cut.
        counts: the counts of :class:`StashCounts`: [schedules, moments, stages, COLUMNS].
        older: the number of versions of the weights besides the newest: [schedules, stages].
    """
    moments = counts.reshape(*counts.shape[:2], -1)
    fixed = sizes.static.sum(axis=1) + older @ sizes.version.T
    held = moments @ sizes.counted.reshape(len(sizes.table), -1).T
    return fixed + held.max(axis=1)


class StashCounts:
    """Counts the tensors that the stages of a schedule hold at each moment that can be a memory peak.

    Args:
        schedule: the schedule with its RECOMPUTE actions. Overlapped actions count as if they ran after each other.
        timeline: the timeline of the schedule, which has the times that messages wait. None for an estimate that fits
            many cuts: all stages take equal times, a backward twice as long as a forward. The counts of a stage then
            depend only on its own recompute mode.
        replicas: the number of replicas of the model. The first replica sums the gradients of all.
        others: counts of the same schedule; their moments are added.
    """

    def __init__(
        self,
        schedule: schedules.Schedule,
        timeline: schedules.Timeline | None = None,
        replicas: int = 1,
        others: StashCounts | None = None,
    ) -> None:
        self._schedule, self._timeline, self._replicas, self._others = schedule, timeline, replicas, others

    @cached_property
    def by_device(self) -> tuple[Ints, ...]:
        """Counts at the moments of each device, and at the sum over replicas: [moments, stages, COLUMNS] per device."""
        if self._timeline is None:
            ones, none = [1.0] * self._schedule.stages, [0.0] * self._schedule.stages
            costs = schedules.StageCosts(ones, ones, ones, recompute=none)
            timeline = schedules.simulate(self._schedule, costs)
        else:
            timeline = self._timeline
        moments = schedules.memory_during(timeline)
        if self._timeline is None:  # many cuts use the counts, so equal moments are worth finding
            moments = map(_distinct, moments)
        by_device = tuple(
            self._with_replicas(counts, self._schedule.stages_of(device))
            for device, counts in enumerate(moments)
        )
        if self._others is None:
            return by_device
        return tuple(map(np.concatenate, zip(by_device, self._others.by_device, strict=True)))

    def _with_replicas(self, counts: Ints, stages: Sequence[int]) -> Ints:
        """Add a moment at the end of the step, when the first replica holds the gradients of all replicas."""
        table = np.pad(counts, ((0, int(self._replicas > 1)), (0, 0), (0, 0)))
        if self._replicas > 1:
            of_first = np.array([stage < self._schedule.model_stages for stage in stages])
            table[-1, :, VERSION] = (self._replicas - 1) * of_first
        return table

    @cached_property
    def by_stage(self) -> tuple[Ints, ...]:
        """Counts of each stage alone: [moments, COLUMNS] per stage."""
        alone = {
            stage: counts[:, column]
            for device, counts in enumerate(self.by_device)
            for column, stage in enumerate(self._schedule.stages_of(device))
        }
        return tuple(alone[stage] for stage in range(self._schedule.stages))

    @cached_property
    def older(self) -> tuple[int, ...]:
        """Versions of the weights besides the newest, per stage; zeros unless the schedule is asynchronous."""
        return tuple(count - 1 for count in schedules.live_versions(self._schedule))

    @cached_property
    def _different(self) -> tuple[Ints, Ints]:
        """Distinct rows of counts, and the row of each stage, so that equal stages are computed only once."""
        most = max(map(len, self.by_stage))
        table = np.array(
            [
                np.r_[np.resize(counts, (most, counts.shape[1])).ravel(), older]
                for counts, older in zip(self.by_stage, self.older, strict=True)
            ]
        )
        different, inverse = np.unique(table, axis=0, return_inverse=True)
        return different, inverse.reshape(-1)

    def peak_bytes_of_stages(self, sizes: StageSizes) -> Floats:
        """Return the peak bytes of a stage at each place in the schedule, for many cuts: [stages, cuts]."""
        different, place = self._different
        counts = different[:, :-1].reshape(len(different), -1, 1, COLUMNS)
        return device_peak_bytes(sizes, counts, different[:, -1:])[place]


def _distinct(counts: Ints) -> Ints:
    """Return the moments that differ: ten times as fast on rows of bytes as ``np.unique(counts, axis=0)``."""
    table = np.ascontiguousarray(counts).reshape(len(counts), -1)
    rows = table.view(np.dtype((np.void, table.dtype.itemsize * table.shape[1])))
    return counts[np.unique(rows[:, 0], return_index=True)[1]]


def with_modes(bare: schedules.Schedule, modes: Sequence[Mode]) -> schedules.Schedule:
    """Insert the recompute and offload actions for the modes of the model's stages, in every replica."""
    count = bare.micro_batches
    stages = {
        mode: [stage for stage in range(bare.stages) if modes[stage % len(modes)] == mode]
        for mode in set(modes)
    }
    for mode, parts in (("always", range(count)), ("except-last", range(count - 1))):
        if mode in stages:
            bare = schedules.insert_recompute(bare, stages[mode], parts)
    return schedules.insert_offload(bare, stages["offload"]) if "offload" in stages else bare
