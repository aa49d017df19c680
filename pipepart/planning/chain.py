"""The best cut of a chain of layers into stages: smallest bottleneck, within each device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """What a stage costs that begins at one layer, for each end behind it (entry 0: that layer alone).

    Attributes:
        seconds: compute on a device of speed 1.
        transfer_seconds: communication at both borders; infinite where a border is not allowed.
        fixed_bytes: what it holds however many micro-batches are in flight.
        stash_bytes: what it holds for each of them.
    """

    seconds: Floats
    transfer_seconds: Floats
    fixed_bytes: Floats
    stash_bytes: Floats


@dataclass(frozen=True)
class Site:
    """A device as the cut sees it: its speed, and its memory in bytes (infinite for no limit)."""

    speed: float
    memory: float


@dataclass(frozen=True)
class ChainCut:
    """Where each stage begins, which device (by index) each is on, and the largest value of any stage."""

    starts: tuple[int, ...]
    sites: tuple[int, ...]
    worst: float


RowValue = Callable[[Row, Site, int], Floats]


def best_cut(
    rows: Iterable[Row],
    layers: int,
    sites: Sequence[Site],
    stages: int,
    in_flight: Sequence[int],
    value: RowValue | None = None,
) -> ChainCut | None:
    """The cut of a chain into exactly ``stages`` stages whose largest load is smallest.

    A stage's load is its compute on its device plus the communication at its borders; one that does not fit its
    device is not allowed. Devices are used in the order given, some may be left out. Exact, by dynamic programming
    over suffixes: the best way to lay the layers from ``a`` on over ``s`` stages on the devices from ``d`` on is
    a first stage ``[a, b)`` on ``d`` and the best way from ``b`` on over ``s - 1`` stages on later devices, or it
    leaves ``d`` out. A suffix is the right state because the number of micro-batches in flight at a stage depends
    on the number of stages from it to the end (as in Alpa, Zheng et al. 2022, section 5.2).

    Args:
        rows: one :class:`Row` for each first layer, from the last layer to the first.
        layers: number of layers.
        sites: the devices.
        stages: number of stages.
        in_flight: micro-batches in flight at a stage, by the number of stages from it to the end, from 1 on.
        value: what to minimise the largest of in place of the load, without any limit.

    Returns:
        The cut, or None where no cut into that many stages fits.

    Takes O(layers² × stages) operations for like devices, times the number of devices for unlike ones.
    """
    value = value or load_where_it_fits
    alike = all(site == sites[0] for site in sites)
    # With like devices it does not matter which are left out: one table serves for all of them.
    used = sites[:1] if alike else sites
    best = np.full((len(used) + 1, stages + 1, layers + 1), np.inf)
    ends = np.full((len(used) + 1, stages + 1, layers + 1), -1, dtype=np.int64)
    best[:, 0, layers] = -np.inf
    if alike:
        best[1] = best[0]
    for start, row in zip(range(layers - 1, -1, -1), rows, strict=True):
        for index in range(len(used) - 1, -1, -1):
            rest = best[0 if alike else index + 1]
            for left in range(1, min(stages, layers - start) + 1):
                worst = np.maximum(value(row, used[index], in_flight[left - 1]), rest[left - 1, start + 1 :])
                end = int(np.argmin(worst))
                skipped = np.inf if alike else rest[left, start]
                if worst[end] <= skipped:
                    best[index, left, start], ends[index, left, start] = worst[end], start + 1 + end
                else:
                    best[index, left, start] = skipped
    if len(sites) < stages or not np.isfinite(best[0, stages, 0]):
        return None
    return _trace(best, ends, stages, layers, alike)


def load_where_it_fits(row: Row, site: Site, in_flight: int) -> Floats:
    """A stage's seconds on ``site``; infinite where its memory does not fit."""
    seconds = row.seconds / site.speed + row.transfer_seconds
    return np.where(memory(row, in_flight) <= site.memory, seconds, np.inf)


def shortage(row: Row, site: Site, in_flight: int) -> Floats:
    """Bytes that a stage lacks on ``site``; negative where it fits."""
    lack = memory(row, in_flight) - site.memory
    return np.where(np.isfinite(row.transfer_seconds), lack, np.inf)


def memory(row: Row, in_flight: int) -> Floats:
    """Bytes that a stage holds at the most."""
    return row.fixed_bytes + in_flight * row.stash_bytes


def _trace(best: Floats, ends: NDArray[np.int64], stages: int, layers: int, alike: bool) -> ChainCut:
    starts, sites = [], []
    index, start = 0, 0
    for left in range(stages, 0, -1):
        while ends[index, left, start] < 0:
            index += 1
        starts.append(start)
        sites.append(len(sites) if alike else index)
        start = int(ends[index, left, start])
        index = 0 if alike else index + 1
    assert start == layers
    return ChainCut(tuple(starts), tuple(sites), float(best[0, stages, 0]))
