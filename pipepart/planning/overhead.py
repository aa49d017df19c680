"""Adds the measured runtime overhead of a profile to its layer costs, and to the devices and links of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from ..cluster import Cluster, Device, Link
from ..profiling import LayerCost, Overhead, Profile

_LinkOrPair = TypeVar("_LinkOrPair", bound=Link)


def most_on_a_host(devices: Iterable[Device]) -> int:
    """Return the largest number of these devices that are CPU devices of one host of this machine."""
    return max(Counter(each.host for each in devices if each.torch_device == "cpu").values(), default=0)


def with_overhead(
    profile: Profile, cluster: Cluster, computing: int | None = None
) -> tuple[Profile, Cluster]:
    """Return the profile and the cluster with the measured overhead included in their seconds.

    Layers get slower by the factor measured while other devices compute. ``action_seconds`` of CPU devices and the
    latency of links become the larger of the described and the measured value. Nothing changes if no device of the
    cluster is a CPU device of this machine.

    The returned profile has an empty ``overhead``, so a second call changes nothing. ``LayerCost.slowdown`` is then the
    factor that the seconds include.

    Args:
        profile: has the measured overhead.
        cluster: the devices and links.
        computing: number of CPU devices of a host that compute at once; None for all.
    """
    overhead, on_cpu = profile.overhead, most_on_a_host(cluster.devices)
    if overhead == Overhead() or not on_cpu:
        return profile, cluster
    slower = partial(_slower, overhead=overhead, devices=computing or on_cpu, threads=profile.threads or 1)
    costs = tuple(
        entry.model_copy(update={"layers": tuple(map(slower, entry.layers)), "loss": slower(entry.loss)})
        for entry in profile.costs
    )
    devices = tuple(
        device.model_copy(
            update={"action_seconds": max(device.action_seconds, overhead.action_seconds)}
            if device.torch_device == "cpu"
            else {}
        )
        for device in cluster.devices
    )

    def with_latency(link: _LinkOrPair) -> _LinkOrPair:
        return link.model_copy(update={"latency": max(link.latency, overhead.message_seconds)})

    return profile.model_copy(update={"costs": costs, "overhead": Overhead()}), cluster.model_copy(
        update={
            "devices": devices,
            "link": with_latency(cluster.link),
            "links": tuple(map(with_latency, cluster.links)),
            "message_seconds": max(cluster.message_seconds, overhead.message_seconds),
            "step_seconds": max(cluster.step_seconds, overhead.step_seconds),
        }
    )


def serial_seconds(profile: Profile, micro_batches: int) -> float:
    """Return the seconds that one device takes for all layers and micro-batches while all other devices are idle."""
    costs = profile.at(micro_batches)
    includes_slowdown = profile.overhead == Overhead()  # with_overhead has multiplied the seconds by it
    layers = (*costs.layers, costs.loss)
    return micro_batches * sum(
        cost.seconds / (cost.slowdown if includes_slowdown else 1.0) for cost in layers
    )


def _slower(cost: LayerCost, overhead: Overhead, devices: int, threads: int) -> LayerCost:
    """Return the cost of a layer while ``devices`` CPU devices compute at once, each with ``threads`` threads."""
    factor = overhead.slowdown(cost.slowdown, devices, threads)
    return cost.scaled(factor, factor).model_copy(update={"slowdown": factor})
