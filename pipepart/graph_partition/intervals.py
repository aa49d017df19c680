"""The best cut of a sequence of layers into intervals, one per device, by dynamic programming over suffixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .device_orders import Orders

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Intervals:
    """For each device state and each first layer, the best cut of the layers from there to the end.

    Attributes:
        orders: the orders of the devices.
        best: value of the best cut, [states, layers + 1]; infinite if there is no cut.
        edge: edge of the cut's first stage, [states, layers + 1].
        end: layer after the cut's first stage, [states, layers + 1].
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
        """Return the first layer and the device type of each stage in the best cut of all layers."""
        full, start = self.orders.full, 0
        state = int(full[self.best[full, 0].argmin()])
        first_layers, types = [], []
        while start < self.best.shape[1] - 1:
            edge = int(self.edge[state, start])
            first_layers.append(start)
            types.append(int(self.orders.type[edge]))
            state, start = int(self.orders.rest[edge]), int(self.end[state, start])
        return tuple(first_layers), tuple(types)


def best_intervals(
    orders: Orders,
    layers: int,
    rows: Iterable[tuple[int, Floats]],
    joined: Callable[[Floats, Floats], Floats] = np.maximum,
) -> Intervals:
    """Return the best cut of each suffix of the layers for each device state.

    The best cut of the layers from ``a`` on has a first stage ``[a, b)`` on one device of the state, followed by the
    best cut from ``b`` on over the remaining devices. Takes O(layers x longest stage x edges).

    Args:
        orders: the orders of the devices.
        layers: number of layers.
        rows: pairs (first layer, values of the stages that start there and end after 1, 2, ... layers), from the last
            layer to the first. Values are [edges, ends], or [1, ends] if equal for all edges; infinite for a forbidden
            stage.
        joined: combines the values of two stages: ``np.maximum`` or ``np.add``.
    """
    best = np.full((len(orders.available), layers + 1), np.inf)
    best[orders.ends, layers] = -np.inf if joined is np.maximum else 0.0
    chosen = np.zeros(best.shape, dtype=np.int32)
    end_of = np.zeros(best.shape, dtype=np.int32)
    targets, firsts = np.unique(orders.state, return_index=True)
    target_of_edge = np.repeat(np.arange(len(targets)), np.diff(np.r_[firsts, len(orders.state)]))
    edges = np.arange(len(orders.state))
    for start, values in rows:
        if not values.size:
            continue
        both = joined(values, best[orders.rest, start + 1 : start + 1 + values.shape[1]])
        end = both.argmin(axis=1)
        of_edge = both[edges, end]
        smallest = np.minimum.reduceat(of_edge, firsts)
        # Edges with the smallest value, in reverse order: among equal edges the first is written last.
        winners = np.flatnonzero(of_edge <= smallest[target_of_edge])[::-1]
        best[targets, start] = smallest
        chosen[orders.state[winners], start] = winners
        end_of[orders.state[winners], start] = start + 1 + end[winners]
    return Intervals(orders, best, chosen, end_of)
