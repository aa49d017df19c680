"""Seconds and bytes that cross the borders of many cuts, with the values that go straight past stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from .layer_ranges import ChainCosts
from .skips import Past
from .stage_links import StageLinks
from .stage_memory import Floats, Ints

Borders = NDArray[np.int64]  # [cuts, borders]


class Crossings:
    """What the stages of cuts on given devices send and receive for one micro-batch.

    Args:
        costs: of the layers.
        cluster: has the links.
        devices: the name of each stage's device.
    """

    def __init__(self, costs: ChainCosts, cluster: Cluster, devices: Sequence[str]) -> None:
        self._costs, self._cluster, self._devices = costs, cluster, devices
        stages, links = range(len(devices)), StageLinks(cluster, devices)
        if costs.skips:  # [stages, stages]
            self._straight = np.array([[a < b and links.is_straight(a, b) for b in stages] for a in stages])
            self._per_byte = np.array([[links.seconds_per_byte(a, b) for b in stages] for a in stages])

    def seconds(self, borders: Borders, columns: Sequence[int]) -> Floats:
        """[cuts, columns]: seconds to send and receive outputs and gradients. Stages of one device need none.

        A message costs its sender and its receiver. A value that goes past stages adds its bytes to what the border
        before its receiver and that behind its sender cost, and no latency: it travels beside the messages there.

        Args:
            borders: of the cuts.
            columns: in which the seconds of each stage are added up.
        """
        costs, stages = self._costs, range(len(self._devices))
        found = np.zeros((len(borders), max(columns) + 1))
        sizes = self.message_bytes(borders)
        for stage in stages[:-1]:
            if self._devices[stage] != self._devices[stage + 1]:
                link = self._cluster.link_between(self._devices[stage], self._devices[stage + 1])
                rate = link.message_bandwidth
                once = link.latency + (sizes[:, stage] / rate if rate else 0.0)
                crossing = np.where(costs.trained[borders[:, stage] - 1], 2 * once, once)
                found[:, columns[stage]] += crossing
                found[:, columns[stage + 1]] += crossing
        if costs.skips:
            cuts, ways = np.nonzero((past := self.past(borders)).bytes)
            source, target = past.source[cuts, ways], past.target[cuts, ways]
            once = past.bytes[cuts, ways] * self._per_byte[source, target]
            for stage, border in ((source, source), (target, target - 1)):
                trained = costs.trained[borders[cuts, border] - 1]
                np.add.at(found, (cuts, np.array(columns)[stage]), np.where(trained, 2 * once, once))
        return found

    def message_bytes(self, borders: Borders) -> Ints:
        """[cuts, borders]: the output of each stage, as it is sent to the next one."""
        sizes = self._costs.output_bytes[borders - 1]
        if self._costs.skips:
            past, between = self.past(borders), np.arange(borders.shape[1])[:, None, None]
            over = (past.source <= between) & (between < past.target)  # [borders, cuts, ways]
            sizes = np.maximum(sizes - (over * past.bytes).sum(axis=2).T, 0)  # estimated bytes are rounded
        return sizes

    def past(self, borders: Borders) -> Past:
        """Return the values that go past stages: [cuts, ways]; 0 bytes in cuts where one does not."""
        past = self._costs.skips.past(borders)
        return past._replace(bytes=np.where(self._straight[past.source, past.target], past.bytes, 0))
