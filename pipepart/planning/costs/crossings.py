"""Links, message bytes and skip connections between the stages of many cuts, each with its order of devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from .layer_ranges import ChainCosts
from .skips import SkipTransfers
from .stage_memory import Floats, Ints

Borders = NDArray[np.int64]  # [cuts, borders]


class Crossings:
    """Computes the messages between the stages of cuts, for one micro-batch.

    Args:
        costs: the costs of the layers.
        cluster: has the links.
    """

    def __init__(self, costs: ChainCosts, cluster: Cluster) -> None:
        self._costs, self._cluster = costs, cluster
        self._pairs: dict[int, tuple[float, float]] = {}

    def links(self, source: Ints, target: Ints) -> tuple[Floats, Floats]:
        """Return the latency and the seconds per byte between devices; zeros from a device to itself.

        Args:
            source, target: positions of the devices in the cluster, two arrays of the same shape.
        """
        if not self._cluster.links_differ:
            link, apart = self._cluster.link, source != target
            rate = link.message_bandwidth
            return apart * link.latency, apart * (1 / rate if rate else 0.0)
        pairs, at = np.unique(source * len(self._cluster) + target, return_inverse=True)
        table = np.array([self._link(pair) for pair in pairs.tolist()]).reshape(-1, 2)
        latency, per_byte = table[at.reshape(source.shape)].transpose(-1, *range(source.ndim))
        return latency, per_byte

    def message_bytes(self, borders: Borders, devices: Ints) -> Ints:
        """Return the bytes that each stage sends to the next stage: [cuts, borders].

        Args:
            borders: the first layer of each stage but the first: [cuts, borders].
            devices: the device of each stage: [cuts, stages].
        """
        sizes = self._costs.output_bytes[borders - 1]
        if self._costs.skips:
            skips, between = self.skips(borders, devices), np.arange(borders.shape[1])[:, None, None]
            over = (skips.source <= between) & (between < skips.target)  # [borders, cuts, skips]
            sizes = np.maximum(sizes - (over * skips.bytes).sum(axis=2).T, 0)  # estimated bytes are rounded
        return sizes

    def skips(self, borders: Borders, devices: Ints) -> SkipTransfers:
        """Return the transfers straight past stages: [cuts, skips]; 0 bytes where stages relay the value."""
        skips = self._costs.skips.transfers(borders)
        if not self._cluster.links_differ:
            return skips
        _, per_byte = self.links(devices[:, :-1], devices[:, 1:])
        relayed = np.cumsum(np.pad(per_byte, ((0, 0), (1, 0))), axis=1)
        rows = np.arange(len(borders))[:, None]
        _, direct = self.links(devices[rows, skips.source], devices[rows, skips.target])
        straight = direct <= (relayed[rows, skips.target] - relayed[rows, skips.source]) * (1 + 1e-12)
        return skips._replace(bytes=np.where(straight, skips.bytes, 0))

    def _link(self, pair: int) -> tuple[float, float]:
        if pair not in self._pairs:
            source, target = (self._cluster.devices[at].name for at in divmod(pair, len(self._cluster)))
            link = self._cluster.link_between(source, target)
            rate = link.message_bandwidth
            self._pairs[pair] = (0.0, 0.0) if source == target else (link.latency, 1 / rate if rate else 0.0)
        return self._pairs[pair]
