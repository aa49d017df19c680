"""Memory and recompute modes of the stages of many cuts, each on an order of devices of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from ...cluster import Cluster
from .crossings import Borders, Crossings
from .layer_ranges import ChainCosts
from .stage_memory import Floats, Ints, Mode, StageSizes, StashCounts, device_peak_bytes, least_memory


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
        costs, cluster, counts, copies: as given.
        modes: that a device may use. All stages of a device use the same one.
        may_recompute: False if no stage ever recomputes.
        rows: the schedule row of each stage, as ``device_of``.
        stages: of one copy.
        crossings: what stages send to each other.
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
        self.crossings = Crossings(costs, cluster)
        self.counts = counts
        self._stages_of = [np.flatnonzero(self.rows == row) for row in range(int(self.rows.max()) + 1)]
        self._limited = costs.may_exceed(least_memory(cluster))
        self.may_recompute = self._limited or self.modes[0] != "never"
        limits = [device.memory_bytes for device in cluster.devices]
        self._limits = np.array([np.inf if limit is None else limit for limit in limits])

    def memory(self, borders: Borders, orders: Ints) -> tuple[Ints, Floats]:
        """Return the mode of each device, and the bytes that the device with the largest deficit lacks.

        The mode is the first that fits the device, else the one with the least memory. Devices with the same stages
        have the same one.

        Args:
            borders: of the cuts: [cuts, borders].
            orders: the device of each schedule row, by its position in the cluster: [cuts, rows].

        Returns:
            The index of the mode of each row, [cuts, rows], and the deficits, [cuts]; negative where all devices fit.
        """
        if not self._limited:
            return np.zeros(orders.shape, dtype=np.int64), np.full(len(borders), -np.inf)
        sizes, limits = self._sizes(self.costs.edges(borders)), self._limits[orders]
        modes = np.zeros(orders.shape, dtype=np.int64)
        lacks = self._needs(sizes, 0) - limits
        of_all = lacks[:, self._same_stages].max(axis=1)
        for mode in range(1, len(self.modes)):
            if (of_all <= 0).all():
                break
            short = self._needs(sizes, mode) - limits
            short_of_all = short[:, self._same_stages].max(axis=1)
            better = (of_all > 0) & (short_of_all < of_all)
            modes[better] = mode
            lacks, of_all = np.where(better, short, lacks), np.where(better, short_of_all, of_all)
        return modes, lacks.max(axis=1)

    def stage_modes(self, borders: Borders, orders: Ints) -> list[Mode]:
        """Return the mode of each stage of one cut (the only row of ``borders``), as :meth:`memory` chooses it."""
        chosen = self.memory(borders, orders)[0][0]
        trains = self.costs.has_backward[self.costs.edges(borders)[0, 1:] - 1]
        return [
            self.modes[chosen[row]] if train else "never"
            for row, train in zip(self.rows[: self.stages], trains, strict=True)
        ]

    @cached_property
    def _same_stages(self) -> Ints:
        """[copies, rows]: for each schedule row, the rows that have the same stages."""
        table = np.empty((self.copies, len(self._stages_of)), dtype=np.int64)
        for row, stages in enumerate(self._stages_of):
            table[:, row] = self.rows[stages[0] % self.stages :: self.stages]
        return table

    def _sizes(self, edges: Borders) -> StageSizes:
        """The sizes of the stages of cuts, with the values that wait there: [cuts, stages]."""
        sizes = StageSizes.of_table(self.costs.size_table(edges))
        if not self.costs.skips:
            return sizes
        waiting = self.costs.skips.waiting_of(edges[:, 1:-1])
        return sizes.with_waiting(np.where(self.costs.has_backward[edges[:, 1:] - 1], waiting, 0))

    def _needs(self, sizes: StageSizes, mode: int) -> Floats:
        """[cuts, devices]: peak bytes if all devices use a mode, by its index."""
        counts, table = self.counts[self.modes[mode]], sizes.table
        older = np.array([counts.older])
        needs = []
        for stages, moments in zip(self._stages_of, counts.by_device, strict=True):
            of_row = StageSizes.of_table(table[:, stages % self.stages])
            # Further copies have no optimizer state: the first one's optimizer steps for all.
            state = np.where(stages < self.stages, 0, self.costs.state_per_gradient) * of_row.version
            needs.append(device_peak_bytes(of_row.without(state), moments[None], older[:, stages])[0])
        return np.stack(needs, axis=1)
