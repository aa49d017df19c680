"""Adds the runtime overhead and the collectives of a profile to its layer costs, devices and links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from ..cluster import Cluster, Device, Link
from ..profiling import LayerCost, Overhead, Profile, Timing
from ..profiling.costs import Collective
from .partition.reductions import collective_seconds, ports_of, slowest_link

_LinkOrPair = TypeVar("_LinkOrPair", bound=Link)


def most_on_a_host(devices: Iterable[Device]) -> int:
    """Return the largest number of these devices that are CPU devices of one host of this machine."""
    return max(Counter(each.host for each in devices if each.torch_device == "cpu").values(), default=0)


def with_overhead(
    profile: Profile, cluster: Cluster, computing: int | None = None
) -> tuple[Profile, Cluster]:
    """Return the profile and the cluster with collectives and the measured overhead included in their seconds.

    Collectives within layers take the seconds of the slowest link in any group of devices that share a stage. The
    backward for the inputs includes those of the backward.
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
        return _with_collectives(profile, cluster), cluster
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

    cluster = cluster.model_copy(
        update={
            "devices": devices,
            "link": with_latency(cluster.link),
            "links": tuple(map(with_latency, cluster.links)),
            "message_seconds": max(cluster.message_seconds, overhead.message_seconds),
            "step_seconds": max(cluster.step_seconds, overhead.step_seconds),
        }
    )
    slowed = profile.model_copy(update={"costs": costs, "overhead": Overhead()})
    return _with_collectives(slowed, cluster), cluster


def collectives_of_layers(
    profile: Profile, cluster: Cluster, micro_batches: int
) -> list[tuple[float, float]]:
    """Return the seconds of the collectives of each layer, in its forward and in its backward; the last is the loss.

    Args:
        profile: as measured.
        cluster: the devices, of which each ``profile.tensor`` consecutive ones share a stage.
        micro_batches: their number.
    """
    costs, count = profile.at(micro_batches), profile.tensor
    entries = (*costs.layers, costs.loss)
    if not any(entry.forward_collectives or entry.backward_collectives for entry in entries):
        return [(0.0, 0.0)] * len(entries)
    names = [device.name for device in cluster.devices]
    groups = [names[first : first + count] for first in range(0, len(names) - count + 1, count)]
    sharing = ports_of(groups, cluster)
    links = [slowest_link(group, cluster, sharing) for group in groups]
    latency, per_byte = (max(column) for column in zip(*links, strict=True))

    def seconds(collectives: Iterable[Collective]) -> float:
        return sum(
            each.count * collective_seconds(each.kind, each.bytes, count, latency, per_byte)
            for each in collectives
        )

    return [(seconds(entry.forward_collectives), seconds(entry.backward_collectives)) for entry in entries]


def _with_collectives(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile with the seconds of collectives in those of the layers."""
    if profile.tensor == 1:
        return profile
    # A device of speed 0.5 takes twice the seconds of its layers, but not of collectives: these are right for the
    # fastest devices, and too long for slower ones.
    speed = max(device.speed for device in cluster.devices)
    entries = []
    for costs in profile.costs:
        taken = collectives_of_layers(profile, cluster, costs.micro_batches)
        *layers, loss = (
            _longer(cost, forward * speed, backward * speed)
            for cost, (forward, backward) in zip((*costs.layers, costs.loss), taken, strict=True)
        )
        entries.append(costs.model_copy(update={"layers": tuple(layers), "loss": loss}))
    return profile.model_copy(update={"costs": tuple(entries)})


def _longer(cost: LayerCost, forward: float, backward: float) -> LayerCost:
    """Return the cost with collectives in its seconds."""
    return cost.model_copy(
        update={
            "forward": Timing(seconds=cost.forward.seconds + forward, spread=cost.forward.spread),
            "backward_input": Timing(
                seconds=cost.backward_input.seconds + backward, spread=cost.backward_input.spread
            ),
            "forward_collectives": (),
            "backward_collectives": (),
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
