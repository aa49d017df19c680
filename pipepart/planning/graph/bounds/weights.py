"""Weights of device types: make the work that unlike devices do comparable, for a lower bound on the bottleneck."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

Floats = NDArray[np.float64]


def device_weights(seconds: Sequence[Floats], counts: Sequence[int]) -> Floats:
    """The weight of each type of device that makes the lower bound on the bottleneck largest.

    Let the work of a node be the least of ``weights[k] x seconds`` over the types k. Whatever the weights, a device of
    type k does at most ``weights[k] x T`` of work in T seconds. So the bottleneck is at least the work of all nodes
    over the sum of the weights of all devices. The best weights are the dual of the linear program that splits nodes
    into fractions. Where the types differ only in speed, the speeds are these weights; else HiGHS solves the program.

    Args:
        seconds: of each node on each type, infinite where it may not run.
        counts: number of devices of each type.
    """
    useful = [bool(np.isfinite(mine).any()) for mine in seconds]
    first = useful.index(True)
    weights = np.zeros(len(seconds))
    for index, mine in enumerate(seconds):
        weights[index] = _relative_speed(seconds[first], mine) if useful[index] else 0.0
    if np.isfinite(weights).all():
        return weights / weights.max()
    return _dual_weights(seconds, counts)


def node_work(seconds: Sequence[Floats], weights: Floats) -> Floats:
    """The work of each node: its least weighted seconds on any type."""
    products = [
        np.where(np.isfinite(mine), np.nan_to_num(mine, posinf=0.0) * value, np.inf)
        for mine, value in zip(seconds, weights, strict=True)
    ]
    return np.min(products, axis=0)


def _relative_speed(reference: Floats, mine: Floats) -> float:
    """Speed relative to the reference, NaN if it differs between nodes."""
    if not np.array_equal(np.isfinite(reference), np.isfinite(mine)):
        return np.nan
    counted = np.isfinite(reference) & (reference + mine > 0)
    if not counted.any():
        return 1.0
    if (mine[counted] == 0).any():
        return np.nan
    ratios = reference[counted] / mine[counted]
    return float(ratios.min()) if 0 < ratios.min() >= ratios.max() * (1 - 1e-9) else np.nan


def _dual_weights(seconds: Sequence[Floats], counts: Sequence[int]) -> Floats:
    allowed = np.isfinite(np.array(seconds))
    type_indices, nodes = np.nonzero(allowed)
    cost = np.array(seconds)[type_indices, nodes]
    scale = float(cost.max()) or 1.0
    shares = len(cost)
    # The last variable is the bottleneck; a type's share of all seconds stays within its devices' time.
    time = csr_array(
        (
            np.append(cost / scale, -np.array(counts, dtype=float)),
            (
                np.append(type_indices, np.arange(len(counts))),
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
    weights = np.maximum(-np.asarray(solved.ineqlin.marginals), 0.0)
    return weights / weights.max() if weights.max() > 0 else np.ones(len(counts))
