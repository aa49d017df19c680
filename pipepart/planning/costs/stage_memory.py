"""The peak memory of a device: the formula of cut searches, predictions and checks. The joint search estimates it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import schedules

from ...cluster import Cluster

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The micro-batches for which a stage repeats its forward right before the backward instead of keeping the stash.
Recompute = Literal["never", "except-last", "always"]
RecomputeChoice = Literal["auto", "never", "except-last", "always"]
# Whether a stage keeps its stash in the memory of its host between forward and backward.
Offload = Literal["never", "stash"]
OffloadChoice = Literal["auto", "never", "stash"]
# What a stage does with its stash: keep it for all micro-batches ("never"), recompute it, or offload it.
Mode = Literal["never", "except-last", "always", "offload"]

RECOMPUTES: frozenset[Mode] = frozenset({"except-last", "always"})
ModeChoice = Literal["auto", "never", "except-last", "always", "offload", "stash"]

# The recompute modes that a stage may use, the fastest first and the one with the least memory last.
MODES: Mapping[RecomputeChoice, tuple[Recompute, ...]] = {
    "auto": ("never", "except-last", "always"),
    "never": ("never",),
    "except-last": ("except-last",),
    "always": ("always",),
}
# Whether recompute or offload is faster depends on the cut, so they are tried apart.
MODE_SETS: Mapping[ModeChoice, tuple[Mode, ...]] = {
    **MODES,
    "offload": ("never", "offload"),
    "stash": ("offload",),
}


# Columns of the tables of counts and sizes: what a device holds at a moment is the sum of count times size.
STASH, INPUT, DEFERRED = range(
    3
)  # of each micro-batch: the full stash, the input only, and what W still needs
KEPT = slice(0, 3)  # these three
MESSAGES = slice(3, 5)  # that wait: the input, and the gradient of the output
WORKSPACE = slice(
    5, 10
)  # of the action that runs: F, B, I, W, or a B that makes the gradients of the weights
VERSION = (
    10  # gradients of the weights: of further replicas, or, with a count of -1, those that are not there
)
COLUMNS = 11
_FIXED = 2  # further columns of sizes, in front: static bytes and one more version of the weights


@dataclass(frozen=True)
class StageSizes:
    """Bytes of stages. Each field is an array of shape [cuts, stages of one device, ...].

    Attributes:
        static: parameters, gradients, optimizer state and buffers.
        version: one more version of the trained weights (asynchronous schedules), or the gradients of a replica.
        per_micro_batch: [cuts, stages, 3]: the full stash, the input only (before a recompute), and what the weight
            gradients need between I and W.
        messages: [cuts, stages, 2]: the input, and the gradient of the output.
        transient: [cuts, stages, 5]: the most that F, B, I, W, and a B that makes the gradients of the weights, need
            besides what is kept while they run.
    """

    static: Floats
    version: Floats
    per_micro_batch: Floats
    messages: Floats
    transient: Floats

    def with_waiting(self, waiting: Floats | Ints) -> StageSizes:
        """Return the sizes with further bytes, [cuts, stages], for each micro-batch in flight."""
        kept = self.per_micro_batch.copy()
        kept[..., [STASH, INPUT]] += waiting[..., None]
        return replace(self, per_micro_batch=kept)

    def without(self, state: Floats) -> StageSizes:
        """Return the sizes without so many static bytes, [cuts, stages]."""
        return replace(self, static=self.static - state)

    @property
    def table(self) -> Floats:
        """[cuts, stages, 2 + COLUMNS]: static and version, then what the columns of a moment count."""
        fixed = np.stack([self.static, self.version], axis=-1)
        parts = [fixed, self.per_micro_batch, self.messages, self.transient, self.version[..., None]]
        return np.concatenate(parts, axis=-1)

    @classmethod
    def of_table(cls, table: Floats) -> StageSizes:
        """Return the sizes with this ``table``."""
        counted = table[..., _FIXED:]
        return cls(
            table[..., 0], table[..., 1], counted[..., KEPT], counted[..., MESSAGES], counted[..., WORKSPACE]
        )


def device_peak_bytes(sizes: StageSizes, counts: Ints, older: Ints) -> Floats:
    """Return the peak memory of a device for several schedules and several cuts: [schedules, cuts].

    The formula, summed over the stages of the device::

        sum(static + older * version) + max over moments of
            sum(stashes + inputs only + deferred + messages that wait) + transient of the action that runs
            - gradients of weights that have none

    Args:
        sizes: of the device's stages, one row a cut.
        counts: [schedules, moments, stages, COLUMNS]: of :class:`StashCounts`.
        older: [schedules, stages]: versions of the weights besides the newest.
    """
    table = sizes.table
    moments = counts.reshape(*counts.shape[:2], -1)
    fixed = sizes.static.sum(axis=1) + older @ sizes.version.T
    held = moments @ table[..., _FIXED:].reshape(len(table), -1).T
    return fixed + held.max(axis=1)


def least_memory(cluster: Cluster) -> float:
    """Return the bytes of the device with the least memory; infinity if none has a limit."""
    limits = (device.memory_bytes for device in cluster.devices)
    return min((float(limit) for limit in limits if limit is not None), default=math.inf)


class StashCounts:
    """What the stages of a schedule hold at each moment that can be a peak of memory.

    Args:
        schedule: with its RECOMPUTE actions. Overlapped pairs of actions count as one after the other.
        timeline: of the schedule, which says how long messages wait. None for an estimate of many cuts: as if all
            stages took equal times, a backward twice that of a forward. The counts of a stage then depend on its own
            recompute mode only.
        replicas: of the model, whose gradients the first one adds up.
        others: counts of the same schedule whose moments count as well.
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
        """Per device [moments, stages, COLUMNS]: of :func:`schedules.memory_moments`, and of the sum over replicas."""
        if self._timeline is None:
            ones, none = [1.0] * self._schedule.stages, [0.0] * self._schedule.stages
            costs = schedules.StageCosts(ones, ones, ones, recompute=none)
            moments = schedules.memory_moments(schedules.simulate(self._schedule, costs))
        else:  # used once: there is nothing to gain by leaving out moments that cannot be a peak
            moments = schedules.memory_during(self._timeline)
        found = tuple(
            self._with_replicas(counts, self._schedule.stages_of(device))
            for device, counts in enumerate(moments)
        )
        if self._others is None:
            return found
        return tuple(map(np.concatenate, zip(found, self._others.by_device, strict=True)))

    def _with_replicas(self, counts: Ints, stages: Sequence[int]) -> Ints:
        """[moments, stages, COLUMNS]: with the gradients of replicas, which the first one has when all have run."""
        table = np.pad(counts, ((0, int(self._replicas > 1)), (0, 0), (0, 0)))
        if self._replicas > 1:
            of_first = np.array([stage < self._schedule.model_stages for stage in stages])
            table[-1, :, VERSION] = (self._replicas - 1) * of_first
        return table

    @cached_property
    def by_stage(self) -> tuple[Ints, ...]:
        """Per stage [moments, COLUMNS], for the stage alone."""
        alone = {
            stage: counts[:, column]
            for device, counts in enumerate(self.by_device)
            for column, stage in enumerate(self._schedule.stages_of(device))
        }
        return tuple(alone[stage] for stage in range(self._schedule.stages))

    @cached_property
    def older(self) -> tuple[int, ...]:
        """Per stage, the versions of its weights besides the newest; zeros unless the schedule is asynchronous."""
        return tuple(count - 1 for count in schedules.live_versions(self._schedule))

    @cached_property
    def _different(self) -> tuple[Ints, Ints]:
        """The different counts of stages, and which of them each stage has: compute each only once."""
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
        """Peak bytes of each stage of the schedule (rows), for the sizes of one stage in many cuts (columns)."""
        different, place = self._different
        counts = different[:, :-1].reshape(len(different), -1, 1, COLUMNS)
        return device_peak_bytes(sizes, counts, different[:, -1:])[place]


def with_modes(bare: schedules.Schedule, modes: Sequence[Mode]) -> schedules.Schedule:
    """Insert the actions that the modes of the model's stages ask for, in every replica alike."""
    count = bare.micro_batches
    stages = {
        mode: [stage for stage in range(bare.stages) if modes[stage % len(modes)] == mode]
        for mode in set(modes)
    }
    for mode, parts in (("always", range(count)), ("except-last", range(count - 1))):
        if mode in stages:
            bare = schedules.insert_recompute(bare, stages[mode], parts)
    return schedules.insert_offload(bare, stages["offload"]) if "offload" in stages else bare
