"""Adds the measured runtime overhead of a profile to layer costs, devices and links."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TypeVar

from ..cluster import Cluster, Link
from ..profiling import LayerCost, Overhead, Profile, Timing

_LinkOrPair = TypeVar("_LinkOrPair", bound=Link)


def with_overhead(profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Return (profile, cluster) with the measured overhead included in their costs.

    Layers are slowed down by the other devices of their host; actions and messages get the overhead of the runtime.
    Only CPU devices of this machine have an overhead. Overheads of devices and links are ``max(described, measured)``.
    The returned profile has an empty overhead, so a second call changes nothing. The ``slowdown`` of a layer in it is
    the factor that its seconds include.

    Args:
        profile: with the measured overhead.
        cluster: the devices.
    """
    overhead = profile.overhead
    on_cpu = Counter(device.host for device in cluster.devices if device.torch_device == "cpu")
    if overhead == Overhead() or not on_cpu:
        return profile, cluster
    slower = partial(_slower, overhead=overhead, devices=max(on_cpu.values()), threads=profile.threads or 1)
    costs = tuple(
        costs_of_size.model_copy(
            update={"layers": tuple(map(slower, costs_of_size.layers)), "loss": slower(costs_of_size.loss)}
        )
        for costs_of_size in profile.costs
    )
    devices = tuple(
        device.model_copy(
            update={"action_seconds": max(device.action_seconds, overhead.action_seconds)}
            if device.torch_device == "cpu"
            else {}
        )
        for device in cluster.devices
    )

    def raised(link: _LinkOrPair) -> _LinkOrPair:
        return link.model_copy(update={"latency": max(link.latency, overhead.message_seconds)})

    return profile.model_copy(update={"costs": costs, "overhead": Overhead()}), cluster.model_copy(
        update={
            "devices": devices,
            "link": raised(cluster.link),
            "links": tuple(map(raised, cluster.links)),
            "message_seconds": max(cluster.message_seconds, overhead.message_seconds),
        }
    )


def serial_seconds(profile: Profile, micro_batches: int) -> float:
    """Return the seconds of all layers for all micro-batches on a single device, without slowdown by other devices."""
    costs = profile.at(micro_batches)
    includes_slowdown = profile.overhead == Overhead()  # see with_overhead
    layers = (*costs.layers, costs.loss)
    return micro_batches * sum(
        layer.seconds / (layer.slowdown if includes_slowdown else 1.0) for layer in layers
    )


def _slower(cost: LayerCost, overhead: Overhead, devices: int, threads: int) -> LayerCost:
    """Return the cost of a layer if ``devices`` devices of its host compute at the same time."""
    factor = overhead.slowdown(cost.slowdown, devices, threads)

    def slowed(timing: Timing) -> Timing:
        return Timing(seconds=timing.seconds * factor, spread=timing.spread * factor)

    return cost.model_copy(
        update={
            "forward": slowed(cost.forward),
            "backward_input": slowed(cost.backward_input),
            "backward_weight": slowed(cost.backward_weight),
            "split_seconds": None if cost.split_seconds is None else cost.split_seconds * factor,
            "slowdown": factor,
        }
    )
