"""What devices with several stages each have to do and to hold, in many cuts at once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ..stage_plan import Recompute
from .layer_ranges import ChainCosts, Floats
from .stage_memory import PeakCandidates, StashCounts

Borders = NDArray[np.int64]


class ChunkCosts:
    """A profiled chain under a schedule whose devices have several stages each.

    Args:
        costs: of the layers.
        cluster: the devices.
        device_of: the row of the schedule that each stage is in.
        kept: what stages may do, the quickest first, and what the schedule's devices keep at once if all of them do.

    Attributes:
        cluster: the devices.
        modes: what a device may do, all its stages alike.
        rows: the row of the schedule that each stage is in.
    """

    def __init__(
        self,
        costs: ChainCosts,
        cluster: Cluster,
        device_of: Sequence[int],
        kept: Mapping[Recompute, StashCounts],
    ) -> None:
        self.cluster = cluster
        self.modes = tuple(kept)
        self._costs, self._kept = costs, kept
        self._limited = any(device.memory_bytes is not None for device in cluster.devices)
        self.rows = np.array(device_of)
        self._sizes: dict[int, tuple[int, ...]] = {}

    def of(self, borders: Borders) -> CutTable:
        """What the cuts (rows) with these borders cost."""
        costs = self._costs
        ends = np.full((len(borders), 1), costs.layers)
        edges = np.hstack([np.zeros_like(ends), borders, ends])
        seconds = np.diff(costs.compute_sums[edges], axis=1)
        again = np.diff(costs.forward_sums[edges], axis=1)
        again = np.where(costs.backward_at[edges[:, 1:] - 1], again, 0.0)
        return CutTable(self, borders, self._summed(seconds), self._summed(again), self._needs(edges))

    def crossing_seconds(self, borders: Borders, order: Sequence[int]) -> Floats:
        """What each device has to send and receive for a micro-batch."""
        names = [self.cluster.devices[site].name for site in order]
        seconds = np.zeros((len(borders), len(order)))
        for border, (one, other) in enumerate(itertools.pairwise(self.rows)):
            if one != other:
                link = self.cluster.link_between(names[one], names[other])
                crossing = self._costs.border_seconds(link)[borders[:, border]]
                seconds[:, one] += crossing
                seconds[:, other] += crossing
        return seconds

    def _summed(self, of_stage: Floats) -> Floats:
        """Sums over the stages of each device."""
        return np.stack([of_stage[:, own].sum(axis=1) for own in self._own()], axis=1)

    def _own(self) -> list[NDArray[np.int64]]:
        return [np.flatnonzero(self.rows == row) for row in range(int(self.rows.max()) + 1)]

    def _needs(self, edges: Borders) -> Floats:
        """Bytes that each device holds at once, at most: [modes, cuts, devices]; zeros where all is well anyway."""
        if not self._limited:
            return np.zeros((len(self.modes), len(edges), len(self._own())))
        pieces, inverse = np.unique(
            edges[:, :-1] * (self._costs.layers + 1) + edges[:, 1:], return_inverse=True
        )
        table = np.array([self._sizes_of(piece) for piece in pieces.tolist()])
        sizes = table[inverse.reshape(len(edges), -1)]
        fixed = [sizes[:, own, 0].sum(axis=1) + sizes[:, own, 1].max(axis=1) for own in self._own()]
        kept = [
            [
                _most(sizes[:, own, 2 : 2 + held.weighed], moments[:, :, : held.weighed])
                for own, moments in zip(self._own(), held.by_device, strict=True)
            ]
            for held in (self._kept[mode] for mode in self.modes)
        ]
        return np.array(fixed, dtype=float).T + np.array(kept, dtype=float).transpose(0, 2, 1)

    def _sizes_of(self, piece: int) -> tuple[int, ...]:
        """Static and transient bytes of a stage, and those that it keeps of a micro-batch."""
        if piece not in self._sizes:
            costs = self._costs
            layers = slice(*divmod(piece, costs.layers + 1))
            self._sizes[piece] = (
                costs.held_bytes(layers),
                int(costs.peak_bytes[layers].max() + costs.arriving_bytes[layers.stop - 1]),
                *costs.kept_sizes(layers),
            )
        return self._sizes[piece]


class CutTable:
    """Many cuts (rows), and what each device (columns) has to do and to hold in each.

    Args:
        costs: that it was made with.
        borders: of each cut.
        seconds: compute of a micro-batch at speed 1.
        again: of it what is run once more where the device does that.
        needs: bytes, for each thing that a device may do.
    """

    def __init__(
        self, costs: ChunkCosts, borders: Borders, seconds: Floats, again: Floats, needs: Floats
    ) -> None:
        self.borders = borders
        self._costs, self._seconds, self._again, self._needs = costs, seconds, again, needs

    def lacks(self, order: Sequence[int]) -> Floats:
        """Bytes that each device lacks if it does what needs least; negative where it has more than it needs."""
        return self._needs.min(axis=0) - self._limits(order)

    def choices(self, order: Sequence[int]) -> NDArray[np.int64]:
        """What each device does, as a position in the modes: the first that fits, else what needs least."""
        fits = self._needs <= self._limits(order)
        return np.where(fits.any(axis=0), fits.argmax(axis=0), self._needs.argmin(axis=0))

    def loads(self, order: Sequence[int], choices: NDArray[np.int64]) -> Floats:
        """Seconds of each device for a micro-batch."""
        again = np.array([mode != "never" for mode in self._costs.modes])[choices]
        speeds = np.array([self._costs.cluster.devices[site].speed for site in order])
        seconds = (self._seconds + np.where(again, self._again, 0.0)) / speeds
        return seconds + self._costs.crossing_seconds(self.borders, order)

    def _limits(self, order: Sequence[int]) -> Floats:
        limits = [self._costs.cluster.devices[site].memory_bytes for site in order]
        return np.array([np.inf if limit is None else limit for limit in limits])


def _most(sizes: NDArray[np.int64], moments: PeakCandidates) -> NDArray[np.int64]:
    """The most that the stages of a device keep at any of the moments, for many sizes: [cuts]."""
    return (sizes.reshape(len(sizes), -1) @ moments.reshape(len(moments), -1).T).max(axis=1)
