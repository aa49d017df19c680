"""Finds the replicas of a model that run alike, so that one of each class is simulated.

Replicas run alike if their devices are as fast, their links are as good, and they run as many micro-batches. A port
that several of them use gives each an even share: a message then takes as long as the messages of all of them together,
sent at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import schedules

from ...cluster import Cluster

Pair = tuple[int, int]  # two stages of a replica that send to each other
_Value = TypeVar("_Value")
Route = Sequence[tuple[Hashable, float]]  # ports, and the bytes per second that a message has there


@dataclass(frozen=True)
class ReplicaClasses:
    """The classes of replicas.

    Attributes:
        firsts: the first replica of each class. The first class has replica 0.
        class_of: the class of each replica.
        micro_batches: of the first replicas of all classes, together. The last of these have one less than the others,
            as in :func:`schedules.replicate`.
    """

    firsts: tuple[int, ...]
    class_of: tuple[int, ...]
    micro_batches: int

    @property
    def all_differ(self) -> bool:
        """True if no two replicas run alike."""
        return len(self.firsts) == len(self.class_of)

    @property
    def sizes(self) -> list[int]:
        """The number of replicas in each class."""
        counts = Counter(self.class_of)
        return [counts[number] for number in range(len(self.firsts))]


class Routes:
    """Ports that each message passes, and each replica's share of their bandwidth.

    Args:
        devices: the device of each stage, for each replica.
        pairs: the stages of a replica that send to each other.
        cluster: the devices and links.
    """

    def __init__(self, devices: Sequence[Sequence[str]], pairs: Sequence[Pair], cluster: Cluster) -> None:
        self._devices, self._cluster, self._places = devices, cluster, cluster.places
        self._ways = [way for one, other in pairs for way in ((one, other), (other, one))]
        own = [Counter(self._ports(replica)) for replica in range(len(devices))] if cluster.network else []
        total = sum(own, Counter[Hashable]())
        self._parts = [{port: count / total[port] for port, count in mine.items()} for mine in own]

    def whole(self, source: str, target: str) -> Route:
        """Return the ports from one device to another, each with all its bandwidth for messages."""
        route = self._places.route(source, target)
        if not route or (compress := self._places.link(source, target).compress) is None:
            return route
        return [(port, rate / compress.bytes_left) for port, rate in route]

    def of(self, replica: int, source: str, target: str) -> Route:
        """Return the ports from one device of a replica to another, with the replica's part of their bandwidth."""
        parts = self._parts[replica] if self._parts else {}
        return [(port, rate * parts[port]) for port, rate in self.whole(source, target)]

    def key(self, replica: int) -> Hashable:
        """Return what the messages of a replica take, whatever the names of its devices are."""
        if not self._cluster.links_differ:
            return ()
        names, own, found = dict[Hashable, int](), self._devices[replica], []
        for one, other in self._ways:
            link = self._places.link(own[one], own[other])
            route = self.of(replica, own[one], own[other])
            numbered = tuple((names.setdefault(port, len(names)), rate) for port, rate in route)
            found.append((own[one] == own[other], link.message_bandwidth, link.latency, numbered))
        return tuple(found)

    def _ports(self, replica: int) -> Iterator[Hashable]:
        own = self._devices[replica]
        for one, other in self._ways:
            yield from (port for port, _ in self._places.route(own[one], own[other]))


def replica_classes(
    devices: Sequence[Sequence[str]],
    routes: Routes,
    cluster: Cluster,
    micro_batches: int,
    *,
    first_is_special: bool,
) -> ReplicaClasses:
    """Return the classes of replicas.

    Args:
        devices: the device of each stage, for each replica.
        routes: of their messages.
        cluster: the devices and links.
        micro_batches: of all replicas.
        first_is_special: True if the first replica has more to do than the others.
    """
    replicas = len(devices)
    keys: dict[tuple[Hashable, ...], list[int]] = {}
    for replica, own in enumerate(devices):
        count = _share(micro_batches, replica, replicas)
        speeds = tuple(cluster.device(name).speed for name in own)
        key = (count, first_is_special and not replica, speeds, routes.key(replica))
        keys.setdefault(key, []).append(replica)
    # The first replicas have the most micro-batches, so that classes in this order do, too.
    classes = sorted(keys.values())
    if len(classes) == 1 and replicas > 1:  # two of them, which wait for each other's gradients
        classes = [[0], classes[0][1:]]
    class_of = {replica: number for number, members in enumerate(classes) for replica in members}
    firsts = tuple(members[0] for members in classes)
    return ReplicaClasses(
        firsts,
        tuple(class_of[replica] for replica in range(replicas)),
        sum(_share(micro_batches, first, replicas) for first in firsts),
    )


def _share(micro_batches: int, replica: int, replicas: int) -> int:
    """The micro-batches of one replica."""
    return (micro_batches - replica + replicas - 1) // replicas


def timeline_of_all(
    timeline: schedules.Timeline, schedule: schedules.Schedule, classes: ReplicaClasses
) -> schedules.Timeline:
    """Return the timeline of all replicas, given that of one of each class.

    Args:
        timeline: of the replicas ``classes.firsts``.
        schedule: of all replicas.
        classes: of the replicas.
    """
    replicas, shown = len(classes.class_of), len(classes.firsts)
    rows, stages = schedule.devices // replicas, schedule.stages // replicas

    def of_all(of_shown: Sequence[_Value]) -> tuple[_Value, ...]:
        return tuple(of_shown[number * rows + row] for number in classes.class_of for row in range(rows))

    def moved(transfer: schedules.Transfer, replica: int) -> schedules.Transfer:
        away = (replica - transfer.source // stages) * stages
        return transfer._replace(
            source=transfer.source + away,
            target=transfer.target + away,
            micro_batch=None
            if transfer.micro_batch is None
            else transfer.micro_batch // shown * replicas + replica,
        )

    own: list[list[schedules.Transfer]] = [[] for _ in range(shown)]
    for transfer in timeline.transfers:
        own[transfer.source // stages].append(transfer)
    transfers = [
        moved(transfer, replica)
        for replica, number in enumerate(classes.class_of)
        for transfer in own[number]
    ]
    return schedules.Timeline(
        schedule,
        of_all(timeline.starts),
        of_all(timeline.ends),
        of_all(timeline.peak_bytes),
        of_all(timeline.peak_at),
        tuple(sorted(transfers, key=lambda transfer: transfer.start)),
    )
