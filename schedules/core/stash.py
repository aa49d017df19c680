"""What each action adds to the stash of its device, or releases from it."""

from __future__ import annotations

import numpy as np

from .action import Kind
from .costs import StageCosts
from .dependencies import Dependencies


def stash_changes(found: Dependencies, costs: StageCosts) -> np.ndarray:
    """Return the bytes that each leaf adds when it starts (positive) or releases when it ends (negative)."""
    stash = np.asarray(costs.stash_bytes)[found.stage]
    weight = np.asarray(costs.weight_stash_bytes)[found.stage]
    boundary = np.asarray(costs.boundary_bytes)[found.stage]
    change = np.zeros(found.code.size)
    for kind, bytes_changed in (
        (Kind.F, np.where(is_recomputed(found), boundary, stash)),
        (Kind.RECOMPUTE, stash - boundary),
        (Kind.OFFLOAD, boundary - stash),
        (Kind.RELOAD, stash - boundary),
        (Kind.B, -stash),
        (Kind.I, weight - stash),
        (Kind.W, -weight),
    ):
        rows = found.is_kind(kind)
        change[rows] = bytes_changed[rows]
    return change


def is_recomputed(found: Dependencies) -> np.ndarray:
    """Return for each leaf whether its stage and micro-batch has a RECOMPUTE."""
    recomputes = found.is_kind(Kind.RECOMPUTE)
    if not recomputes.any():
        return recomputes
    key = found.stage * (found.micro_batch.max() + 1) + found.micro_batch
    return np.isin(key, key[recomputes])
