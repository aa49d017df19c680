"""The best cut of a row of layers into intervals, one a device, by dynamic programming over suffixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .device_orders import Orders

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Intervals:
    """For each state of the devices and each first layer, the best cut of the layers from there on.

    Attributes:
        orders: of the devices.
        best: its value; shape (states, layers + 1). Infinite where there is none.
        edge, end: the edge of its first stage, and where that stage ends; same shape.
    """

    orders: Orders
    best: Floats
    edge: NDArray[np.int32]
    end: NDArray[np.int32]

    @property
    def value(self) -> float:
        """The value of the best cut of all layers."""
        return float(self.best[self.orders.full, 0].min())

    def stages(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first layer and the type of device of each stage of the best cut of all layers."""
        first_layers, edges = self.walk()
        return first_layers, tuple(int(self.orders.type[edge]) for edge in edges)

    def walk(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first layer and the edge of each stage of the best cut of all layers."""
        full, start = self.orders.full, 0
        state = int(full[self.best[full, 0].argmin()])
        first_layers, edges = [], []
        while start < self.best.shape[1] - 1:
            edge = int(self.edge[state, start])
            first_layers.append(start)
            edges.append(edge)
            state, start = int(self.orders.rest[edge]), int(self.end[state, start])
        return tuple(first_layers), tuple(edges)


def best_intervals(
    orders: Orders,
    layers: int,
    rows: Iterable[tuple[int, Floats]],
    joined: Callable[[Floats, Floats], Floats] = np.maximum,
) -> Intervals:
    """Find the best cut of each suffix over each set of devices.

    The best cut of the layers from ``a`` on over a set of devices is a first stage ``[a, b)`` on one of them, and the
    best cut from ``b`` on over the others. Takes O(layers x longest stage x edges).

    Args:
        orders: of the devices.
        layers: their number.
        rows: for each first layer, from the last to the first, the values of the stages from it to the next ends:
            shape (edges, ends), or (1, ends) if equal for all edges. Infinite for a stage that may not be.
        joined: how the values of two stages become one: the larger one, or ``np.add``.
    """
    best = np.full((len(orders.available), layers + 1), np.inf)
    best[orders.ends, layers] = -np.inf if joined is np.maximum else 0.0
    chosen = np.zeros(best.shape, dtype=np.int32)
    end_of = np.zeros(best.shape, dtype=np.int32)
    targets, firsts = np.unique(orders.state, return_index=True)
    segment = np.repeat(np.arange(len(targets)), np.diff(np.r_[firsts, len(orders.state)]))
    edges = np.arange(len(orders.state))
    for start, values in rows:
        if not values.size:
            continue
        both = joined(values, best[orders.rest, start + 1 : start + 1 + values.shape[1]])
        end = both.argmin(axis=1)
        of_edge = both[edges, end]
        least = np.minimum.reduceat(of_edge, firsts)
        good = np.flatnonzero(of_edge <= least[segment])[::-1]  # of equal ones the first is written last
        best[targets, start] = least
        chosen[orders.state[good], start] = good
        end_of[orders.state[good], start] = start + 1 + end[good]
    return Intervals(orders, best, chosen, end_of)
