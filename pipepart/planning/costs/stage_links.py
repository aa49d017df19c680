"""Decides where a live value that some stages do not use goes straight from stage to stage, past them.

::

    stage 0 ──▶ stage 1 ──▶ stage 2 ──▶ stage 3        the stages' outputs
       └─────────────── skip ─────────────▲            made in stage 0, used in stage 3 only

A value hops from each stage that makes or uses it to the next one that uses it. A hop goes straight unless the links
between the stages on the way are faster. Planning, simulation and runtime all ask here.
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
        """Return True if a value goes straight from a stage to a later one; False if the stages between relay it.

        The seconds for a byte decide: the size of a value is not known to the stage that waits for it.
        """
        relayed = sum(self.seconds_per_byte(stage, stage + 1) for stage in range(source, target))
        return self.seconds_per_byte(source, target) <= relayed

    def hops(self, stages: Sequence[int]) -> list[tuple[int, int]]:
        """Return the hops of a value between the stages that make or use it, in order; relayed ones stage by stage."""
        found: list[tuple[int, int]] = []
        for source, target in pairwise(stages):
            if self.is_straight(source, target):
                found.append((source, target))
            else:
                found += [(stage, stage + 1) for stage in range(source, target)]
        return found

    def seconds_per_byte(self, one: int, other: int) -> float:
        """Return what a byte takes from the device of a stage to that of another; 0 on one device."""
        here, there = self._devices[one], self._devices[other]
        bandwidth = None if here == there else self._cluster.link_between(here, there).message_bandwidth
        return 1 / bandwidth if bandwidth else 0.0
