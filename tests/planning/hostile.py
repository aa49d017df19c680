"""Requests for plans that nobody would write on purpose: odd costs, odd clusters and any constraints, all drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from pipepart import Cluster, Device, Link, Profile
from pipepart.cluster import PairLink
from pipepart.planning.request import ASYNCHRONOUS, BIDIRECTIONAL, CHUNKS
from tests.planning.problems import Layer, profile_of, with_unequal_sizes, with_values


@dataclass(frozen=True)
class Request:
    """The arguments of one call of ``plan``."""

    profile: Profile
    cluster: Cluster
    options: dict[str, Any]


def drawn_request(seed: int, most_layers: int = 8, most_devices: int = 3) -> Request:
    """A chain, or a chain with values that skip layers, on devices that may be unlike or far too small."""
    choose = random.Random(seed)
    layers = _layers(choose, choose.randint(1, most_layers))
    counts = sorted(choose.sample([1, 2, 3, 4, 8], choose.randint(1, 2)))
    kind = choose.choice(["chain", "skips"]) if len(layers) > 2 else "chain"
    profile = profile_of(layers, counts, choose.choice([0.0, 3.0]), optimizer=choose.choice(["sgd", "adam"]))
    if kind == "skips":
        values = [(choose.randint(1, 50), _some_of(choose, len(layers))) for _ in range(choose.randint(1, 5))]
        profile = with_values(profile, values)
    elif choose.random() < 0.3:
        profile = with_unequal_sizes(profile)
    needed = sum(4 * layer.parameters + layer.saved + layer.output for layer in layers) + 50
    cluster = _cluster(choose, choose.randint(1, most_devices), needed)
    return Request(profile, cluster, _options(choose, len(layers), len(cluster), counts))


def _some_of(choose: random.Random, layers: int) -> tuple[int, ...]:
    return tuple(sorted(choose.sample(range(layers), choose.randint(2, min(4, layers)))))


def _layers(choose: random.Random, count: int) -> list[Layer]:
    """Layers whose seconds are equal, full of zeros and ties, or of which the first takes nearly all."""
    style = choose.choice(["any", "equal", "zeros", "one is huge", "ties"])
    split = choose.choice([None, 0.0, 0.3, -0.3, -2.0])

    def seconds() -> float:
        values = {"equal": 1.0, "zeros": choose.choice([0.0, 0.0, 1.0]), "ties": float(choose.randint(0, 2))}
        return values.get(style, choose.uniform(0, 9))

    def size() -> int:
        return choose.choice([0, choose.randint(0, 50), 10**9 if choose.random() < 0.1 else 1])

    layers = []
    for index in range(count):
        layer = Layer(
            forward=seconds(),
            backward_input=seconds(),
            backward_weight=seconds(),
            parameters=size(),
            trained=choose.random() < 0.8,
            output=size(),
            peak=choose.randint(0, 50),
            saved=size(),
            waiting=choose.randint(0, 50),
            keeps_input=choose.random() < 0.5,
            shares_with=(choose.randrange(index),) if index and choose.random() < 0.05 else (),
        )
        if style == "one is huge" and not index:
            layer = replace(layer, forward=5000.0)
        backward = layer.backward_input + layer.backward_weight
        layers.append(replace(layer, split=None if split is None else split * backward))
    return layers


def _cluster(choose: random.Random, count: int, needed: int) -> Cluster:
    memory = choose.choice([None, None, needed, needed // 2 + 1, 1])
    if choose.random() < 0.15:
        return Cluster.parse(
            [f"{memory or needed}B"], hosts=2, devices_per_host=count, link="100B/s", network="10B/s"
        )
    unlike = choose.random() < 0.5
    host = choose.choice([None, 20.0])
    devices = tuple(
        Device(
            name=f"d{index}",
            kind="made up",
            speed=10 ** choose.uniform(-2, 1) if unlike else 1.0,
            memory_bytes=memory if choose.random() < 0.8 else None,
            host_bandwidth=host,
        )
        for index in range(count)
    )
    link = choose.choice([Link(), Link(bandwidth=1000.0), Link(bandwidth=1.0, latency=0.5)])
    slow = (PairLink(between=("d0", "d1"), bandwidth=5.0, latency=1.0),)
    return Cluster(devices=devices, link=link, links=slow if count > 1 and choose.random() < 0.2 else ())


def _options(choose: random.Random, layers: int, devices: int, counts: list[int]) -> dict[str, Any]:
    """One or two constraints of any kind, or none; many contradict each other."""
    names = [f"layer{index}" for index in range(layers)]
    any_of: dict[str, Any] = {
        "micro_batches": choose.choice(counts),
        "recompute": choose.choice(["never", "except-last", "always"]),
        "offload": choose.choice(["never", "stash"]),
        "schedule": choose.choice([*CHUNKS, *ASYNCHRONOUS, *BIDIRECTIONAL, "search"]),
        "stages": choose.randint(1, min(layers, 2 * devices)),
        "chunks": choose.randint(1, 3),
        "replicas": choose.choice(["auto", 2]),
        "colocate": [choose.sample(names, min(2, layers))],
        "cut_before": [f"layer{i}" for i in sorted(choose.sample(range(1, layers), min(2, layers - 1)))],
        "allow_split_ties": True,
        "reduction": choose.choice(["mean", "batch"]),
    }
    return {name: any_of[name] for name in choose.sample(list(any_of), choose.choice([0, 0, 1, 1, 2]))}
