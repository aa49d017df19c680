"""Adds the overhead that a profile measured to the costs of its layers and to the devices and links of a cluster."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TypeVar

from ..cluster import Cluster, Link
from ..profiling import LayerCost, Overhead, Profile, Timing

_LinkOrPair = TypeVar("_LinkOrPair", bound=Link)


def with_overhead(profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Return what to plan with: layers as slow as beside the other devices, and the seconds of the runtime.

    Only CPU devices of this machine have an overhead. Each is ``max(described, measured)``. The profile that is
    returned has none left, so that a second call changes nothing; its ``slowdown`` is what its seconds include.

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
        one.model_copy(update={"layers": tuple(map(slower, one.layers)), "loss": slower(one.loss)})
        for one in profile.costs
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
    """Return the seconds of all layers for all micro-batches, while one device computes and no other does."""
    costs = profile.at(micro_batches)
    counted = profile.overhead == Overhead()  # by with_overhead, in the seconds of the layers
    layers = (*costs.layers, costs.loss)
    return micro_batches * sum(one.seconds / (one.slowdown if counted else 1.0) for one in layers)


def _slower(cost: LayerCost, overhead: Overhead, devices: int, threads: int) -> LayerCost:
    """Return the cost of a layer while other devices compute, too."""
    factor = overhead.slowdown(cost.slowdown, devices, threads)

    def timing(one: Timing) -> Timing:
        return Timing(seconds=one.seconds * factor, spread=one.spread * factor)

    return cost.model_copy(
        update={
            "forward": timing(cost.forward),
            "backward_input": timing(cost.backward_input),
            "backward_weight": timing(cost.backward_weight),
            "split_seconds": None if cost.split_seconds is None else cost.split_seconds * factor,
            "slowdown": factor,
        }
    )
