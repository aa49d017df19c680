"""What a second on each type of device is worth, so that work on unlike devices can be added up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

Floats = NDArray[np.float64]


def weights(seconds: Sequence[Floats], counts: Sequence[int]) -> Floats:
    """Of each type of device, the worth of a second that makes the bound on the bottleneck largest.

    Whatever the weights, a device of type ``k`` does at most ``weights[k]`` x bottleneck of work if that of a node is
    the least of ``weights[k]`` x its seconds there. So the bottleneck is at least all work over the sum of the weights
    of all devices; the best weights are the dual of sharing the nodes out in fractions (a linear program, by HiGHS).

    Args:
        seconds: of each node on each type, infinite where it may not run.
        counts: devices of each type.
    """
    useful = [bool(np.isfinite(mine).any()) for mine in seconds]
    first = useful.index(True)
    worth = np.zeros(len(seconds))
    for index, mine in enumerate(seconds):
        worth[index] = _pace(seconds[first], mine) if useful[index] else 0.0
    if np.isfinite(worth).all():
        return worth / worth.max()
    return _dual(seconds, counts)


def least(seconds: Sequence[Floats], worth: Floats) -> Floats:
    """The work of each node."""
    products = [
        np.where(np.isfinite(mine), np.nan_to_num(mine, posinf=0.0) * value, np.inf)
        for mine, value in zip(seconds, worth, strict=True)
    ]
    return np.min(products, axis=0)


def _pace(reference: Floats, mine: Floats) -> float:
    """How many times quicker than the reference, NaN where that differs from node to node."""
    if not np.array_equal(np.isfinite(reference), np.isfinite(mine)):
        return np.nan
    counted = np.isfinite(reference) & (reference + mine > 0)
    if not counted.any():
        return 1.0
    if (mine[counted] == 0).any():
        return np.nan
    ratios = reference[counted] / mine[counted]
    return float(ratios.min()) if 0 < ratios.min() >= ratios.max() * (1 - 1e-9) else np.nan


def _dual(seconds: Sequence[Floats], counts: Sequence[int]) -> Floats:
    allowed = np.isfinite(np.array(seconds))
    kinds, nodes = np.nonzero(allowed)
    cost = np.array(seconds)[kinds, nodes]
    scale = float(cost.max()) or 1.0
    shares = len(cost)
    # The last variable is the bottleneck; a type's share of all seconds stays within its devices' time.
    time = csr_array(
        (
            np.append(cost / scale, -np.array(counts, dtype=float)),
            (
                np.append(kinds, np.arange(len(counts))),
                np.append(np.arange(shares), np.full(len(counts), shares)),
            ),
        ),
        shape=(len(counts), shares + 1),
    )
    whole = csr_array((np.ones(shares), (nodes, np.arange(shares))), shape=(allowed.shape[1], shares + 1))
    objective = np.append(np.zeros(shares), 1.0)
    solved = linprog(
        objective,
        A_ub=time,
        b_ub=np.zeros(len(counts)),
        A_eq=whole,
        b_eq=np.ones(allowed.shape[1]),
        method="highs",
    )
    if solved.status != 0:
        return np.ones(len(counts))
    worth = np.maximum(-np.asarray(solved.ineqlin.marginals), 0.0)
    return worth / worth.max() if worth.max() > 0 else np.ones(len(counts))
