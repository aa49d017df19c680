"""Computes load, memory and recompute modes of the devices for many cuts of a chain at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from .crossings import Borders, Crossings
from .layer_ranges import ChainCosts
from .stage_memory import (
    RECOMPUTES,
    Floats,
    Ints,
    Mode,
    StageSizes,
    StashCounts,
    device_peak_bytes,
    least_memory,
)


class CutCosts:
    """A profiled chain under a schedule with one or several stages a device.

    Under a bidirectional schedule (chimera) each stage is on two devices, once for each copy of the model::

        copy    0        0       0         1        1       1
        stage   0        1       2         0        1       2        numbers in the schedule: 0 to 5
        row     0        1       2         2        1       0        so rows 0 and 2 have the same stages

    Args:
        costs: of the layers.
        cluster: the devices.
        device_of: the schedule row of each stage, of one copy of the model after the other.
        copies: of the model, which share the micro-batches.
        counts: the modes that a device may use, the fastest first, and the stash counts if all stages use it. Copies of
            stages that offload are taken to keep up with the computation.

    Attributes:
        cluster: the devices.
        counts: the stash counts of each mode.
        modes: all stages of a device use the same one.
        may_recompute: False if no stage ever recomputes.
        rows: the schedule row of each stage, as ``device_of``.
        copies: of the model.
        stages: of one copy.
    """

    def __init__(
        self,
        costs: ChainCosts,
        cluster: Cluster,
        device_of: Sequence[int],
        counts: Mapping[Mode, StashCounts],
        copies: int = 1,
    ) -> None:
        self.cluster, self.counts = cluster, counts
        self.modes = tuple(counts)
        self.rows = np.array(device_of)
        self.copies, self.stages = copies, len(device_of) // copies
        self._costs = costs
        self._own = [np.flatnonzero(self.rows == row) for row in range(int(self.rows.max()) + 1)]
        self._limited = costs.may_exceed(least_memory(cluster))
        self.may_recompute = self._limited or self.modes[0] != "never"
        self._sizes: dict[int, NDArray[np.float64]] = {}
        self._crossings: dict[tuple[int, ...], list[Crossings]] = {}

    def of(self, borders: Borders) -> CutTable:
        """Return the loads and memory of the cuts (rows) with these borders."""
        costs = self._costs
        edges = costs.edges(borders)
        seconds = np.diff(costs.compute_sums[edges], axis=1)
        recompute = np.diff(costs.forward_sums[edges], axis=1)
        recompute = np.where(costs.has_backward[edges[:, 1:] - 1], recompute, 0.0)
        return CutTable(
            self, borders, self._per_device(seconds), self._per_device(recompute), self._needs(edges)
        )

    def stage_modes(self, borders: Sequence[int], order: Sequence[int]) -> list[Mode]:
        """Return the mode of each stage of one cut: the first that fits its device, else the one with the
        least memory.
        """
        cut = np.array(borders, dtype=np.int64)[None, :]
        chosen = self.of(cut).choices(order)[0]
        trains = self._costs.has_backward[self._costs.edges(cut)[0, 1:] - 1]
        return [
            self.modes[chosen[row]] if train else "never"
            for row, train in zip(self.rows[: self.stages], trains, strict=True)
        ]

    def crossing_seconds(self, borders: Borders, order: Sequence[int]) -> Floats:
        """[cuts, devices]: seconds to send and receive for one micro-batch, mean over the copies of the model."""
        rows = self.rows.reshape(self.copies, -1).tolist()
        found = [one.seconds(borders, own) for one, own in zip(self.crossings(order), rows, strict=True)]
        return np.mean(found, axis=0)

    def crossings(self, order: Sequence[int]) -> list[Crossings]:
        """Return what crosses the borders of cuts whose schedule rows are on these devices, for each copy."""
        key = tuple(order)
        if key not in self._crossings:
            devices = [self.cluster.devices[order[row]].name for row in self.rows]
            self._crossings[key] = [
                Crossings(self._costs, self.cluster, devices[first : first + self.stages])
                for first in range(0, len(devices), self.stages)
            ]
        return self._crossings[key]

    @cached_property
    def same_stages(self) -> Ints:
        """[copies, rows]: for each schedule row, the rows that have the same stages."""
        found = np.empty((self.copies, len(self._own)), dtype=np.int64)
        for row, own in enumerate(self._own):
            found[:, row] = self.rows[own[0] % self.stages :: self.stages]
        return found

    @cached_property
    def _counts_of_devices(self) -> list[Ints]:
        """Per device [modes, moments, stages, 11]; needed only if a device may have too little."""
        modes = self.counts.values()
        return [_stacked([kept.by_device[row] for kept in modes]) for row in range(len(self._own))]

    def _per_device(self, of_stage: Floats) -> Floats:
        of_devices = [of_stage[:, own % self.stages].sum(axis=1) for own in self._own]
        return np.stack(of_devices, axis=1) / self.copies

    def _needs(self, edges: Borders) -> Floats:
        """[modes, cuts, devices]: peak bytes; zeros if no device can have too little."""
        if not self._limited:
            return np.zeros((len(self.modes), len(edges), len(self._own)))
        pieces, inverse = np.unique(
            edges[:, :-1] * (self._costs.layers + 1) + edges[:, 1:], return_inverse=True
        )
        table = np.array([self._sizes_of(piece) for piece in pieces.tolist()])
        sizes = table[inverse.reshape(len(edges), -1)]
        if self._costs.skips:
            waiting = self._costs.skips.waiting_of(edges[:, 1:-1])
            sizes[:, :, 2:4] += np.where(self._costs.has_backward[edges[:, 1:] - 1], waiting, 0)[:, :, None]
        needs = []
        older = np.array([kept.older for kept in self.counts.values()])
        for own, counts in zip(self._own, self._counts_of_devices, strict=True):
            table = sizes[:, own % self.stages]
            # Further copies have no optimizer state: the first one's optimizer steps for all.
            table[..., 0] -= np.where(own < self.stages, 0, self._costs.state_per_gradient) * table[..., 1]
            needs.append(device_peak_bytes(StageSizes.of_table(table), counts, older[:, own]))
        return np.stack(needs, axis=2)

    def _sizes_of(self, piece: int) -> NDArray[np.float64]:
        """The table of the sizes of one stage. ``piece`` encodes its first layer and its end."""
        if piece not in self._sizes:
            found = self._costs.sizes(slice(*divmod(piece, self._costs.layers + 1)))
            self._sizes[piece] = found.table[0, 0]
        return self._sizes[piece]


class CutTable:
    """Loads and memory of many cuts (rows) for each device (columns).

    Args:
        costs: of the layers.
        borders: of each cut.
        seconds: compute of one micro-batch at speed 1.
        recompute: extra seconds if the device recomputes.
        needs: [modes, cuts, devices] peak bytes.
    """

    def __init__(
        self, costs: CutCosts, borders: Borders, seconds: Floats, recompute: Floats, needs: Floats
    ) -> None:
        self.borders = borders
        self._costs, self._seconds, self._recompute, self._needs = costs, seconds, recompute, needs

    def deficits(self, order: Sequence[int]) -> Floats:
        """[cuts, devices]: bytes short in the mode with the least memory; negative if the device has more."""
        return self._needs.min(axis=0) - self._limits(order)

    def choices(self, order: Sequence[int]) -> NDArray[np.int64]:
        """[cuts, devices]: index of the recompute mode: the first that fits, else the one with the least memory.

        Devices with the same stages have the same one.
        """
        short = self._needs - self._limits(order)
        short = short[:, :, self._costs.same_stages].max(axis=2)
        fits = short <= 0
        return np.where(fits.any(axis=0), fits.argmax(axis=0), short.argmin(axis=0))

    def loads(self, order: Sequence[int], choices: NDArray[np.int64]) -> Floats:
        """[cuts, devices]: seconds of one micro-batch."""
        recomputes = np.array([mode in RECOMPUTES for mode in self._costs.modes])[choices]
        speeds = np.array([self._costs.cluster.devices[index].speed for index in order])
        seconds = (self._seconds + np.where(recomputes, self._recompute, 0.0)) / speeds
        return seconds + self._costs.crossing_seconds(self.borders, order)

    def _limits(self, order: Sequence[int]) -> Floats:
        limits = [self._costs.cluster.devices[index].memory_bytes for index in order]
        return np.array([np.inf if limit is None else limit for limit in limits])


def _stacked(counts: Sequence[Ints]) -> Ints:
    """[modes, moments, stages, 3]: the counts of each mode, filled up to the same number of moments."""
    most = max(map(len, counts))
    return np.array([np.resize(own, (most, *own.shape[1:])) for own in counts])
