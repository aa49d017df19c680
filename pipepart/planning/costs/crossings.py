"""Seconds and bytes that cross the borders of many cuts, with the values that go straight past stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ..straight import StageLinks
from .layer_ranges import ChainCosts
from .skips import Past
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
        self._links = StageLinks(cluster, devices)

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
                once = link.latency + (sizes[:, stage] / link.bandwidth if link.bandwidth else 0.0)
                crossing = np.where(costs.trained[borders[:, stage] - 1], 2 * once, once)
                found[:, columns[stage]] += crossing
                found[:, columns[stage + 1]] += crossing
        cuts = np.arange(len(borders))
        column_of = np.array(columns)
        for source, target, size in self.past(borders):
            going = np.flatnonzero(size)
            one, other = source[going], target[going]
            pairs = zip(one.tolist(), other.tolist(), strict=True)
            once = size[going] * np.array([self._links.seconds_per_byte(*pair) for pair in pairs])
            for stage, border in ((one, one), (other, other - 1)):
                trained = costs.trained[borders[cuts[going], border] - 1]
                found[cuts[going], column_of[stage]] += np.where(trained, 2 * once, once)
        return found

    def message_bytes(self, borders: Borders) -> Ints:
        """[cuts, borders]: the output of each stage, as it is sent to the next one."""
        sizes = self._costs.output_bytes[borders - 1]
        between = np.arange(borders.shape[1])
        for source, target, size in self.past(borders):
            over = (source[:, None] <= between) & (between < target[:, None])
            sizes = sizes - over * size[:, None]
        return sizes

    def past(self, borders: Borders) -> list[Past]:
        """Return the values that go past stages, one entry for each way of one; 0 bytes in cuts where it does not."""
        stages = range(len(self._devices))
        straight = np.array(
            [[one <= other and self._links.is_straight(one, other) for other in stages] for one in stages]
        )
        return [
            one._replace(bytes=np.where(straight[one.source, one.target], one.bytes, 0))
            for one in (self._costs.skips.past(borders) if self._costs.skips else ())
        ]
