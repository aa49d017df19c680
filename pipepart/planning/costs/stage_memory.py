"""The formula of a device's peak memory, used by every search, the prediction and the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import schedules

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


@dataclass(frozen=True)
class StageSizes:
    """Bytes of stages. Each field is an array of shape [cuts, stages of one device].

    Attributes:
        static: parameters, gradients, optimizer state and buffers.
        version: one more version of the trained weights (asynchronous schedules).
        transient: the largest workspace of one layer, and the incoming gradient of the stage's output.
        per_micro_batch: [cuts, stages, 3]: the full stash, the input only (before a recompute), and what the weight
            gradients need between I and W.
    """

    static: Floats
    version: Floats
    transient: Floats
    per_micro_batch: Floats

    def with_waiting(self, waiting: Floats | Ints) -> StageSizes:
        """Return the sizes with further bytes, [cuts, stages], for each micro-batch in flight."""
        kept = self.per_micro_batch.copy()
        kept[..., :2] += waiting[..., None]
        return replace(self, per_micro_batch=kept)


def device_peak_bytes(sizes: StageSizes, counts: Ints, older: Ints) -> Floats:
    """Return the peak memory of a device for several schedules and several cuts: [schedules, cuts].

    The formula, summed over the stages of the device::

        sum(static + older * version) + max(transient) + max over moments of sum(counts . per_micro_batch)

    Only one layer runs at a time, so the transient bytes of the stages count once.

    Args:
        sizes: of the device's stages, one row a cut.
        counts: [schedules, moments, stages, 3]: micro-batches kept at each moment that can be the peak.
        older: [schedules, stages]: versions of the weights besides the newest.
    """
    cuts, moments = len(sizes.static), counts.reshape(*counts.shape[:2], -1)
    fixed = sizes.static.sum(axis=1) + sizes.transient.max(axis=1) + older @ sizes.version.T
    kept = moments @ sizes.per_micro_batch.reshape(cuts, -1).T
    return fixed + kept.max(axis=1)


class StashCounts:
    """How many micro-batches the stages of a schedule keep for their backwards at each possible memory peak.

    Args:
        schedule: with its RECOMPUTE actions. Overlapped pairs of actions count as one after the other.

    Attributes:
        by_device: per device [moments, stages, 3], see :func:`schedules.peak_candidates`.
        by_stage: per stage [moments, 3], for the stage alone.
        older: per stage, the versions of its weights besides the newest; zeros unless the schedule is asynchronous.
    """

    def __init__(self, schedule: schedules.Schedule) -> None:
        self.by_device: tuple[Ints, ...] = schedules.peak_candidates(schedules.split_overlaps(schedule))
        alone = {
            stage: counts[:, column]
            for device, counts in enumerate(self.by_device)
            for column, stage in enumerate(schedule.stages_of(device))
        }
        self.by_stage: tuple[Ints, ...] = tuple(alone[stage] for stage in range(schedule.stages))
        self.older = tuple(count - 1 for count in schedules.live_versions(schedule))
        # Many stages of a long pipeline have equal counts: compute each different set once.
        most = max(map(len, self.by_stage))
        table = np.array(
            [
                np.r_[np.resize(counts, (most, 3)).ravel(), older]
                for counts, older in zip(self.by_stage, self.older, strict=True)
            ]
        )
        self._different, inverse = np.unique(table, axis=0, return_inverse=True)
        self._different_of = inverse.reshape(-1)

    def peak_bytes_of_stages(self, sizes: StageSizes) -> Floats:
        """Peak bytes of each stage of the schedule (rows), for the sizes of one stage in many cuts (columns)."""
        counts = self._different[:, :-1].reshape(len(self._different), -1, 1, 3)
        return device_peak_bytes(sizes, counts, self._different[:, -1:])[self._different_of]


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
