"""Computes the seconds to sum the gradients of a stage over the replicas of the model.

In one process the first replica fetches the gradients of each other replica in turn, adds them, and updates the
parameters. The other replicas then fetch the parameters. Between hosts, or if replicas share the parameters, each stage
runs collectives, and every replica steps its own optimizer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ...cluster import Cluster
from ...profiling.costs import CollectiveKind
from ..plans.stage_plan import StagePlan

# Speed of adding gradients or copying parameters on one CPU core: 64 MiB take 13 ms.
_CPU_BYTES_PER_SECOND = 5e9


def runs_collectives(cluster: Cluster, shard: bool) -> bool:
    """Return True if collectives sum the gradients of replicas: they share parameters, or there are several hosts."""
    return shard or bool(cluster.network)


def reduce_seconds(
    stages: Sequence[StagePlan], devices: Sequence[Sequence[str]], cluster: Cluster, shard: bool = False
) -> list[list[float]]:
    """Return the seconds of the REDUCE_GRAD of each stage of each replica: [replicas][stages].

    Args:
        stages: the stages of the first replica.
        devices: the device of each stage, for each replica. The copies of a bidirectional schedule are replicas, too.
        cluster: has the links.
        shard: whether replicas share the parameters. The gradients are then reduced and scattered, and the parameters
            gathered before the next step: both together send as much as an all-reduce.
    """
    if len(devices) == 1:
        return [[0.0] * len(stages)]
    groups = list(zip(*devices, strict=True))
    if runs_collectives(cluster, shard):
        rings = [sorted(set(group), key=lambda name: cluster.device(name).host) for group in groups]
        sharing = ports_of(rings, cluster)
        row = [
            all_reduce_seconds(stage.gradient_bytes, ring, cluster, sharing)
            for stage, ring in zip(stages, rings, strict=True)
        ]
        return [row] * len(devices)
    first = [_fetch_seconds(stage, group, cluster) for stage, group in zip(stages, groups, strict=True)]
    return [first, *([[0.0] * len(stages)] * (len(devices) - 1))]


def all_reduce_seconds(
    size: int, ring: Sequence[str], cluster: Cluster, sharing: Counter[object] | None = None
) -> float:
    """Return the seconds of an all-reduce by a ring or by two trees, whichever is faster.

    The ring takes ``2 (n - 1)`` steps, each with 1/n of the bytes (Patarasuk and Yuan 2009). The trees, each
    for one half of the bytes in small pieces, send all bytes up and down (Sanders, Speck and Träff 2009): more bytes,
    but fewer latencies. The slowest link sets the time.

    Args:
        size: bytes to sum.
        ring: names of the devices; devices of the same host side by side.
        cluster: has the links.
        sharing: the number of rings that share the bandwidth of each port at the same time; None for only this ring.

    >>> two = Cluster.parse(["1GiB"], hosts=2, link="100GB/s", network="10GB/s", network_latency=1e-5)
    >>> round(all_reduce_seconds(1_000_000_000, ["device:0", "device:1"], two), 6)
    0.10002
    """
    if len(ring) == 1 or not size:
        return 0.0
    return collective_seconds("all-reduce", size, len(ring), *slowest_link(ring, cluster, sharing))


def collective_seconds(kind: CollectiveKind, size: int, count: int, latency: float, per_byte: float) -> float:
    """Return the seconds of a collective of ``count`` devices.

    All-gathers, reduce-scatters and all-to-alls send the share of each device to each other device, a broadcast sends
    all bytes down a tree, and an all-reduce is as in :func:`all_reduce_seconds`.

    Args:
        kind: what it does.
        size: bytes of the larger one of its input and output, on a device.
        count: number of devices.
        latency, per_byte: seconds of the slowest link.
    """
    share, depth = size / count * per_byte, math.ceil(math.log2(count))
    if kind == "broadcast":
        return depth * latency + size * per_byte
    once = (count - 1) * (latency + share)
    return min(2 * once, 2 * depth * latency + 2 * size * per_byte) if kind == "all-reduce" else once


def slowest_link(
    ring: Sequence[str], cluster: Cluster, sharing: Counter[object] | None = None
) -> tuple[float, float]:
    """Return the latency and the seconds per byte of the slowest link of a ring, as for :func:`all_reduce_seconds`."""
    latency, per_byte = 0.0, 0.0
    places = cluster.places
    for source, target in _neighbours(ring):
        link = places.link(source, target)
        latency = max(latency, link.latency)
        per_byte = max(per_byte, 1 / link.bandwidth if link.bandwidth else 0.0)
        for port, bandwidth in places.route(source, target):
            per_byte = max(per_byte, (sharing or {}).get(port, 1) / bandwidth)
    return latency, per_byte


def _neighbours(ring: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(ring, [*ring[1:], ring[0]], strict=True))


def ports_of(rings: Iterable[Sequence[str]], cluster: Cluster) -> Counter[object]:
    """Return the number of rings that pass each port."""
    places, passed = cluster.places, Counter[object]()
    for ring in rings:
        passed.update({port for pair in _neighbours(ring) for port, _ in places.route(*pair)})
    return passed


def _fetch_seconds(stage: StagePlan, group: Sequence[str], cluster: Cluster) -> float:
    """Return the seconds of the REDUCE_GRAD of the first replica's stage in one process.

    It fetches the gradients of the other replicas one after the other. These then fetch the parameters at the same
    time. On CPU devices no data is transferred, but all bytes are read and written.
    """
    others = group[1:]
    links = [cluster.link_between(group[0], device) for device in others]
    parameters = (link.seconds(stage.parameter_bytes) for link in links)
    seconds = sum(link.seconds(stage.gradient_bytes) for link in links) + max(parameters, default=0.0)
    if cluster.device(group[0]).torch_device == "cpu":
        seconds += len(others) * (stage.gradient_bytes + stage.parameter_bytes) / _CPU_BYTES_PER_SECOND
    return seconds
