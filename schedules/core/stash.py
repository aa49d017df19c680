"""Computes what each action adds to the stash of its device or releases from it."""

from __future__ import annotations

import numpy as np

from .action import Kind
from .costs import StageCosts
from .dependencies import Dependencies

_NOTHING = (0, 0, 0)
# Numbers of micro-batches with their full stash, with their input alone, and with what W needs: how an action changes
# them when it starts, and when it ends.
_CHANGES = {
    Kind.F: ((1, 0, 0), _NOTHING),
    Kind.RECOMPUTE: ((1, -1, 0), _NOTHING),
    Kind.RELOAD: ((1, -1, 0), _NOTHING),
    Kind.OFFLOAD: (_NOTHING, (-1, 1, 0)),
    Kind.B: (_NOTHING, (-1, 0, 0)),
    Kind.I: (_NOTHING, (-1, 0, 1)),
    Kind.W: (_NOTHING, (0, 0, -1)),
}
_RECOMPUTED_F = ((1, 0, 0), (-1, 1, 0))


def count_changes(found: Dependencies) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes of the stash counts at the start and at the end of each leaf action.

    Returns:
        Two arrays of shape (leaves, 3). The columns are micro-batches with their full stash, from F (or RECOMPUTE) to
        the end of B or I; with their input alone, from the end of a forward that is repeated to its RECOMPUTE, or from
        the end of OFFLOAD to the start of RELOAD; and with what W needs, from the end of I to the end of W.
    """
    at_start = np.zeros((found.code.size, 3), dtype=np.int64)
    at_end = np.zeros_like(at_start)
    for kind, (starting, ending) in _CHANGES.items():
        rows = found.is_kind(kind)
        at_start[rows], at_end[rows] = starting, ending
    repeated = found.is_kind(Kind.F) & _is_recomputed(found)
    at_start[repeated], at_end[repeated] = _RECOMPUTED_F
    return at_start, at_end


def stash_changes(found: Dependencies, costs: StageCosts) -> np.ndarray:
    """Return the bytes that each leaf action adds at its start (positive) or releases at its end (negative)."""
    sizes = np.array([costs.stash_bytes, costs.boundary_bytes, costs.weight_stash_bytes])[:, found.stage]
    return (np.add(*count_changes(found)) * sizes.T).sum(axis=1)


def _is_recomputed(found: Dependencies) -> np.ndarray:
    """Return for each leaf whether its stage and micro-batch has a RECOMPUTE."""
    recomputes = found.is_kind(Kind.RECOMPUTE)
    if not recomputes.any():
        return recomputes
    key = found.stage * (found.micro_batch.max() + 1) + found.micro_batch
    return np.isin(key, key[recomputes])
