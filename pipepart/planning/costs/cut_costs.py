"""Memory and recompute modes of the stages of many cuts, each with its order of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from .layer_ranges import ChainCosts
from .stage_memory import Floats, Ints, Mode, StageSizes, StashCounts, device_peak_bytes

Borders = NDArray[np.int64]  # [cuts, borders]


class CutCosts:
    """Computes the memory of cuts of a profiled chain under a schedule with one or several stages per device.

    Under a bidirectional schedule (chimera) each stage is on two devices, once for each copy of the model::

        copy    0        0       0         1        1       1
        stage   0        1       2         0        1       2        numbers in the schedule: 0 to 5
        row     0        1       2         2        1       0        so rows 0 and 2 have the same stages

    Args:
        costs: the costs of the layers.
        cluster: the devices.
        device_of: the schedule row of each stage, for all stages of the first copy of the model, then of the second.
        copies: the number of copies of the model, which share the micro-batches.
        counts: the modes that a device may use, the fastest first, each with the stash counts if all stages use it.
            Copies of offloaded stashes are assumed to keep up with the computation.

    Attributes:
        costs, cluster, counts, copies: as given.
        modes: the modes that a device may use. All stages of a device use the same mode.
        may_recompute: False if no stage ever recomputes.
        rows: the schedule row of each stage, as in ``device_of``.
        stages: the number of stages of one copy.
    """

    def __init__(
        self,
        costs: ChainCosts,
        cluster: Cluster,
        device_of: Sequence[int],
        counts: Mapping[Mode, StashCounts],
        copies: int = 1,
    ) -> None:
        self.costs, self.cluster, self.copies = costs, cluster, copies
        self.modes = tuple(counts)
        self.rows = np.array(device_of)
        self.stages = len(device_of) // copies
        self.counts = counts
        self._stages_of = [np.flatnonzero(self.rows == row) for row in range(int(self.rows.max()) + 1)]
        self._limits = np.array([device.memory for device in cluster.devices])
        self._limited = costs.may_exceed(self._limits.min())
        self.may_recompute = self._limited or self.modes[0] != "never"

    def memory(self, borders: Borders, orders: Ints) -> tuple[Ints, Floats]:
        """Return the mode of each device, and the largest memory deficit of any device in bytes.

        The mode is the first that fits the device, or else the mode that needs the least memory. With two copies of
        the model all devices have the same mode, as each stage is on two of them.

        Args:
            borders: the first layer of each stage but the first: [cuts, borders].
            orders: the device of each schedule row, by its position in the cluster: [cuts, rows].

        Returns:
            The index of the mode of each row, [cuts, rows], and the deficits, [cuts]; negative where all devices fit.
        """
        if not self._limited:
            return np.zeros(orders.shape, dtype=np.int64), np.full(len(borders), -np.inf)
        sizes, limits = self._sizes(self.costs.edges(borders)), self._limits[orders]
        modes = np.zeros(orders.shape, dtype=np.int64)
        deficits = self._needs(sizes, 0) - limits
        worst = self._worst(deficits)
        for mode in range(1, len(self.modes)):
            if (worst <= 0).all():
                break
            mode_deficits = self._needs(sizes, mode) - limits
            mode_worst = self._worst(mode_deficits)
            better = (worst > 0) & (mode_worst < worst)
            modes[better] = mode
            deficits, worst = np.where(better, mode_deficits, deficits), np.where(better, mode_worst, worst)
        return modes, deficits.max(axis=1)

    def stage_modes(self, borders: Borders, orders: Ints) -> list[Mode]:
        """Return the mode of each stage of one cut (the only row of ``borders``), as :meth:`memory` chooses it."""
        chosen = self.memory(borders, orders)[0][0]
        trains = self.costs.has_backward[self.costs.edges(borders)[0, 1:] - 1]
        return [
            self.modes[chosen[row]] if train else "never"
            for row, train in zip(self.rows[: self.stages], trains, strict=True)
        ]

    def _worst(self, deficits: Floats) -> Floats:
        """Return the deficits of the devices whose modes are chosen together: [cuts, rows]."""
        if self.copies == 1:
            return deficits
        return np.broadcast_to(deficits.max(axis=1, keepdims=True), deficits.shape)

    def links(self, source: Ints, target: Ints) -> tuple[Floats, Floats]:
        """Return the latency and the seconds per byte between devices; zeros from a device to itself.

        Args:
            source, target: positions of the devices in the cluster, two arrays of the same shape.
        """
        if not self.cluster.links_differ:
            link, apart = self.cluster.link, source != target
            return apart * link.latency, apart * link.seconds_per_byte
        pairs, at = np.unique(source * len(self.cluster) + target, return_inverse=True)
        seconds = self.cluster.places.seconds
        table = np.array([seconds(*divmod(pair, len(self.cluster))) for pair in pairs.tolist()]).reshape(
            -1, 2
        )
        latency, per_byte = table[at.reshape(source.shape)].transpose(-1, *range(source.ndim))
        return latency, per_byte

    def _sizes(self, edges: Borders) -> StageSizes:
        """Return the sizes of the stages of cuts, with the skipping values that wait there: [cuts, stages]."""
        sizes = self.costs.sizes_of(edges)
        if not self.costs.skips:
            return sizes
        waiting = self.costs.skips.waiting_of(edges[:, 1:-1])
        return sizes.with_waiting(np.where(self.costs.has_backward[edges[:, 1:] - 1], waiting, 0))

    def _needs(self, sizes: StageSizes, mode: int) -> Floats:
        """Return the peak bytes if all devices use the mode with this index: [cuts, devices]."""
        counts, older = self.counts[self.modes[mode]], np.array([self.counts[self.modes[mode]].older])
        needs = []
        for stages, moments in zip(self._stages_of, counts.by_device, strict=True):
            table = sizes.table[:, stages % self.stages]
            # Only the first copy has optimizer state: its optimizer updates all copies.
            table[..., 0] -= np.where(stages < self.stages, 0, self.costs.state_per_gradient) * table[..., 1]
            needs.append(device_peak_bytes(StageSizes(table), moments[None], older[:, stages])[0])
        return np.stack(needs, axis=1)
