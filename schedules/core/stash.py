"""Computes what each action adds to the stash of its device or releases from it, and the peak."""

from __future__ import annotations

from itertools import pairwise

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


def count_changes(graph: Dependencies) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes of the stash counts at the start and at the end of each action.

    Returns:
        Two arrays of shape (actions, 3). The columns are micro-batches with their full stash, from F (or RECOMPUTE) to
        the end of B or I; with their input alone, from the end of a forward that is repeated to its RECOMPUTE, or from
        the end of OFFLOAD to the start of RELOAD; and with what W needs, from the end of I to the end of W.
    """
    at_start = np.zeros((graph.actions, 3), dtype=np.int64)
    at_end = np.zeros_like(at_start)
    for kind, (starting, ending) in _CHANGES.items():
        rows = graph.is_kind(kind)
        at_start[rows], at_end[rows] = starting, ending
    repeated = graph.is_kind(Kind.F) & _is_recomputed(graph)
    at_start[repeated], at_end[repeated] = _RECOMPUTED_F
    return at_start, at_end


def stash_changes(graph: Dependencies, costs: StageCosts) -> np.ndarray:
    """Return the bytes that each action adds at its start (positive) or releases at its end (negative)."""
    sizes = np.array([costs.stash_bytes, costs.boundary_bytes, costs.weight_stash_bytes])[:, graph.stage]
    return (np.add(*count_changes(graph)) * sizes.T).sum(axis=1)


def stash_peaks(graph: Dependencies, costs: StageCosts) -> list[tuple[float, int]]:
    """Return, per device, the peak stash bytes and the position of the action at the peak."""
    change = stash_changes(graph, costs)
    peaks = []
    for first, last in pairwise(graph.offsets):
        change_here = change[first:last]
        levels = np.cumsum(change_here) - np.minimum(
            change_here, 0
        )  # while the action runs: it releases when it ends
        where = int(levels.argmax()) if levels.size else 0
        peaks.append((float(levels[where]) if levels.size else 0.0, where))
    return peaks


def _is_recomputed(graph: Dependencies) -> np.ndarray:
    """Return for each action whether its stage and micro-batch has a RECOMPUTE."""
    recomputes = graph.is_kind(Kind.RECOMPUTE)
    if not recomputes.any():
        return recomputes
    key = graph.stage * (graph.micro_batch.max() + 1) + graph.micro_batch
    return np.isin(key, key[recomputes])
