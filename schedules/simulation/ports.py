"""Ports: what carries one message at a time, such as a link between two devices or the network card of a host."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ..core.costs import StageCosts
from ..core.dependencies import Dependencies
from ..core.schedule import Schedule


class Journeys(NamedTuple):
    """How the message of each edge travels.

    seconds: of each edge, from when its message leaves until it arrives.
    ports: of each edge whose message passes ports, the number of each port and the seconds for which it is taken. The
        message waits until all of them are free and every message that was sent before it has left them.
    sizes: bytes of a message between two stages, the earlier one first; of a stage and itself, of a host copy.
    """

    seconds: np.ndarray
    ports: Mapping[int, list[tuple[int, float]]]
    sizes: Mapping[tuple[int, int], float]


def journeys(schedule: Schedule, costs: StageCosts, graph: Dependencies, contention: bool) -> Journeys:
    """Return how the messages of a schedule travel.

    Each device copies to and from its host one stash at a time. With contention, each link between two devices and each
    of ``costs.ports`` carries one message at a time; otherwise they carry any number.
    """
    seconds = np.zeros((schedule.stages, schedule.stages))
    sizes: dict[tuple[int, int], float] = {}
    numbers: dict[Hashable, int] = {}
    routes: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for sender, receiver, size in _messages(schedule, costs):
        sizes[sender, receiver] = size
        for ends in ((sender, receiver), (receiver, sender)):
            devices = schedule.device_of[ends[0]], schedule.device_of[ends[1]]
            longest = on_link = costs.occupancy_between(*devices, size)
            named = [(("port", name), size / speed) for name, speed in costs.ports.get(devices, ())]
            routes[ends] = []
            for port, taken in named or [(("link", *devices), on_link)]:
                if contention and taken:
                    routes[ends].append((numbers.setdefault(port, len(numbers)), taken))
                    longest = max(longest, taken)
            seconds[ends] = costs.latency_between(*devices) + longest
    between_stages = seconds[graph.source_stage, graph.target_stage]
    travel = np.where(graph.is_copy, np.array(costs.host_copy)[graph.source_stage], between_stages)
    for stage, copying in enumerate(costs.host_copy):
        sizes[stage, stage] = costs.stash_bytes[stage] - costs.boundary_bytes[stage]
        engine = numbers.setdefault(("host", schedule.device_of[stage]), len(numbers))
        routes[stage, stage] = [(engine, copying)] if copying else []
    passing = np.flatnonzero(graph.is_copy | (contention & (graph.source_stage != graph.target_stage)))
    pairs = zip(graph.source_stage[passing].tolist(), graph.target_stage[passing].tolist(), strict=True)
    passed = zip(passing.tolist(), (routes.get(pair) for pair in pairs), strict=True)
    return Journeys(travel, {edge: route for edge, route in passed if route}, sizes)


def _messages(schedule: Schedule, costs: StageCosts) -> Iterator[tuple[int, int, float]]:
    """Yield (earlier stage, later stage, bytes) for each pair of stages that exchange outputs and gradients."""
    for stage in range(schedule.stages):
        following = schedule.next_stage(stage)
        if following is not None:
            yield stage, following, costs.message_bytes[stage]
    for first in range(0, schedule.stages, schedule.model_stages):
        for source, target, size in costs.skips:
            yield first + source, first + target, size
