"""Seconds to sum the gradients of a stage over the replicas of the model, as they will be summed.

In one process the first replica fetches the gradients of the others one after the other, adds them up, and the others
fetch the changed parameters. Between hosts each stage runs an all-reduce, and every replica steps its own optimizer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...cluster import Cluster
from ..plans.stage_plan import StagePlan

# Gradients summed, or parameters copied, on one CPU core: 64 MiB take 13 ms.
_CPU_BYTES_PER_SECOND = 5e9


def runs_all_reduce(cluster: Cluster) -> bool:
    """Return True if replicas are summed by all-reduces: the cluster has several hosts."""
    return bool(cluster.network)


def reduce_seconds(
    stages: Sequence[StagePlan], devices: Sequence[Sequence[str]], cluster: Cluster
) -> list[list[float]]:
    """Return the seconds of the REDUCE_GRAD of each stage of each replica.

    Args:
        stages: of the first replica.
        devices: the device of each stage, for each replica; those of a bidirectional schedule are replicas, too.
        cluster: has the links.
    """
    if len(devices) == 1:
        return [[0.0] * len(stages)]
    groups = list(zip(*devices, strict=True))
    if runs_all_reduce(cluster):
        rings = [sorted(set(group), key=lambda name: cluster.device(name).host) for group in groups]
        sharing = Counter(port for ring in rings for port in _ports(ring, cluster))
        row = [
            all_reduce_seconds(stage.gradient_bytes, ring, cluster, sharing)
            for stage, ring in zip(stages, rings, strict=True)
        ]
        return [row] * len(devices)
    first = [_fetched(stage, group, cluster) for stage, group in zip(stages, groups, strict=True)]
    return [first, *([[0.0] * len(stages)] * (len(devices) - 1))]


def all_reduce_seconds(
    size: int, ring: Sequence[str], cluster: Cluster, sharing: Counter[object] | None = None
) -> float:
    """Return the seconds of an all-reduce: by a ring or by two trees, whichever is faster.

    The ring takes ``2 (n - 1)`` steps with an n-th of the bytes each (Patarasuk and Yuan 2009). The trees, each with
    one half of the bytes in small pieces, send all bytes up and down (Sanders, Speck and Träff 2009): more bytes, but
    fewer latencies. The slowest link decides.

    Args:
        size: bytes to sum.
        ring: names of the devices; those of one host side by side.
        cluster: has the links.
        sharing: the number of rings that pass each port at the same time and share its bandwidth; None for this one.

    >>> two = Cluster.parse(["1GiB"], hosts=2, link="100GB/s", network="10GB/s", network_latency=1e-5)
    >>> round(all_reduce_seconds(1_000_000_000, ["device:0", "device:1"], two), 6)
    0.10002
    """
    count = len(ring)
    if count == 1 or not size:
        return 0.0
    latency, per_byte = 0.0, 0.0
    places = cluster.places
    for one, other in _neighbours(ring):
        link = places.link(one, other)
        latency = max(latency, link.latency)
        per_byte = max(per_byte, 1 / link.bandwidth if link.bandwidth else 0.0)
        for port, bandwidth in places.route(one, other):
            per_byte = max(per_byte, (sharing or {}).get(port, 1) / bandwidth)
    by_ring = 2 * (count - 1) * (latency + size / count * per_byte)
    by_trees = 2 * math.ceil(math.log2(count)) * latency + 2 * size * per_byte
    return min(by_ring, by_trees)


def _neighbours(ring: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(ring, [*ring[1:], ring[0]], strict=True))


def _ports(ring: Sequence[str], cluster: Cluster) -> set[object]:
    places = cluster.places
    return {port for one, other in _neighbours(ring) for port, _ in places.route(one, other)}


def _fetched(stage: StagePlan, group: Sequence[str], cluster: Cluster) -> float:
    """Seconds of the first replica's stage in one process.

    It fetches the gradients of the others one after the other; they fetch the changed parameters at the same time. In
    the memory of a CPU nothing travels, but everything is read and written.
    """
    others = group[1:]
    links = [cluster.link_between(group[0], other) for other in others]
    parameters = (link.seconds(stage.parameter_bytes) for link in links)
    found = sum(link.seconds(stage.gradient_bytes) for link in links) + max(parameters, default=0.0)
    if cluster.device(group[0]).torch_device == "cpu":
        found += len(others) * (stage.gradient_bytes + stage.parameter_bytes) / _CPU_BYTES_PER_SECOND
    return found
