"""Decides whether a skipping value goes straight to the stage that uses it, or through the stages between.

::

    stage 0 ──▶ stage 1 ──▶ stage 2 ──▶ stage 3        the stages' outputs
       └─────────────── skip ─────────────▲            made in stage 0, used in stage 3 only

A value hops from each stage that makes or uses it to the next stage that uses it. A hop goes straight unless the links
between the stages on the way are faster. Planning, simulation and runtime all use this rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ...cluster import Cluster


class StageLinks:
    """The links between the stages of a pipeline.

    Args:
        cluster: has the links.
        devices: the name of each stage's device.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[str]) -> None:
        self._cluster = cluster
        self._devices = devices

    def is_straight(self, source: int, target: int) -> bool:
        """Return True if a value goes straight from a stage to a later stage; False if the stages between relay it.

        The rule compares seconds per byte, because the stage that waits for a value does not know its size.
        """
        relayed = sum(self.seconds_per_byte(stage, stage + 1) for stage in range(source, target))
        return self.seconds_per_byte(source, target) <= relayed

    def hops(self, stages: Sequence[int]) -> list[tuple[int, int]]:
        """Return the hops of a value between the stages that make or use it; a relayed hop is split by stage."""
        hops: list[tuple[int, int]] = []
        for source, target in pairwise(stages):
            if self.is_straight(source, target):
                hops.append((source, target))
            else:
                hops += [(stage, stage + 1) for stage in range(source, target)]
        return hops

    def seconds_per_byte(self, one: int, other: int) -> float:
        """Return the seconds to send a byte between the devices of two stages; 0 on the same device."""
        here, there = self._devices[one], self._devices[other]
        bandwidth = None if here == there else self._cluster.link_between(here, there).message_bandwidth
        return 1 / bandwidth if bandwidth else 0.0
