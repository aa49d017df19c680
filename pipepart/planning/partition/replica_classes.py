"""Sorts the replicas of a model into classes that run alike, so that one replica of each class is simulated.

Replicas run alike if they have equal device speeds, equal links and the same number of micro-batches. Replicas that use
the same port get equal shares of its bandwidth. A message then takes as long as the messages of all these replicas
together, sent at the same time.
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
Route = Sequence[tuple[Hashable, float]]  # ports, and the bandwidth of a message there in bytes per second


@dataclass(frozen=True)
class ReplicaClasses:
    """Classes of replicas that run alike.

    Attributes:
        firsts: the first replica of each class. The first class contains replica 0.
        class_of: the class of each replica.
        micro_batches: the sum over the first replicas of all classes. The last of these replicas may have one
            micro-batch less than the others, as in :func:`schedules.replicate`.
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
        self._pairs = [(source, target) for pair in pairs for source, target in (pair, pair[::-1])]
        uses = [Counter(self._ports(replica)) for replica in range(len(devices))] if cluster.network else []
        total = sum(uses, Counter[Hashable]())
        self._shares = [{port: count / total[port] for port, count in counts.items()} for counts in uses]

    def whole(self, source: str, target: str) -> Route:
        """Return the ports from one device to another, each with its whole bandwidth."""
        route = self._places.route(source, target)
        if not route or (compress := self._places.link(source, target).compress) is None:
            return route
        return [(port, rate / compress.bytes_left) for port, rate in route]

    def of(self, replica: int, source: str, target: str) -> Route:
        """Return the ports from one device of a replica to another, each with the replica's share of its bandwidth."""
        shares = self._shares[replica] if self._shares else {}
        return [(port, rate * shares[port]) for port, rate in self.whole(source, target)]

    def key(self, replica: int) -> Hashable:
        """Return a key that is equal for replicas with equal links and ports, whatever the names of their devices."""
        if not self._cluster.links_differ:
            return ()
        numbers, devices, messages = dict[Hashable, int](), self._devices[replica], []
        for pair in self._pairs:
            source, target = (devices[stage] for stage in pair)
            link, route = self._places.link(source, target), self.of(replica, source, target)
            numbered = tuple((numbers.setdefault(port, len(numbers)), rate) for port, rate in route)
            messages.append((source == target, link.message_bandwidth, link.latency, numbered))
        return tuple(messages)

    def _ports(self, replica: int) -> Iterator[Hashable]:
        devices = self._devices[replica]
        for source, target in self._pairs:
            yield from (port for port, _ in self._places.route(devices[source], devices[target]))


def replica_classes(
    devices: Sequence[Sequence[str]],
    routes: Routes,
    cluster: Cluster,
    micro_batches: int,
    *,
    first_is_special: bool,
) -> ReplicaClasses:
    """Sort replicas into classes that run alike.

    Args:
        devices: the device of each stage, for each replica.
        routes: the ports of their messages.
        cluster: the devices and links.
        micro_batches: the number of micro-batches of all replicas together.
        first_is_special: True if the first replica has more work than the others.
    """
    replicas = len(devices)
    keys: dict[tuple[Hashable, ...], list[int]] = {}
    for replica, names in enumerate(devices):
        count = _share(micro_batches, replica, replicas)
        speeds = tuple(cluster.device(name).speed for name in names)
        key = (count, first_is_special and not replica, speeds, routes.key(replica))
        keys.setdefault(key, []).append(replica)
    # The first replicas have the most micro-batches, so the first classes have the most, too.
    classes = sorted(keys.values())
    if len(classes) == 1 and replicas > 1:  # simulate two replicas, which wait for each other's gradients
        classes = [[0], classes[0][1:]]
    class_of = {replica: number for number, members in enumerate(classes) for replica in members}
    firsts = tuple(members[0] for members in classes)
    return ReplicaClasses(
        firsts,
        tuple(class_of[replica] for replica in range(replicas)),
        sum(_share(micro_batches, first, replicas) for first in firsts),
    )


def _share(micro_batches: int, replica: int, replicas: int) -> int:
    """Return the number of micro-batches of a replica."""
    return (micro_batches - replica + replicas - 1) // replicas


def timeline_of_all(
    timeline: schedules.Timeline, schedule: schedules.Schedule, classes: ReplicaClasses
) -> schedules.Timeline:
    """Return the timeline of all replicas, from the timeline of one replica of each class.

    Args:
        timeline: the timeline of the replicas ``classes.firsts``.
        schedule: the schedule of all replicas.
        classes: the classes of the replicas.
    """
    replicas, simulated = len(classes.class_of), len(classes.firsts)
    rows, stages = schedule.devices // replicas, schedule.stages // replicas

    def of_all(of_firsts: Sequence[_Value]) -> tuple[_Value, ...]:
        return tuple(of_firsts[number * rows + row] for number in classes.class_of for row in range(rows))

    def moved(transfer: schedules.Transfer, replica: int) -> schedules.Transfer:
        offset = (replica - transfer.source // stages) * stages
        return transfer._replace(
            source=transfer.source + offset,
            target=transfer.target + offset,
            micro_batch=None
            if transfer.micro_batch is None
            else transfer.micro_batch // simulated * replicas + replica,
        )

    of_class: list[list[schedules.Transfer]] = [[] for _ in range(simulated)]
    for transfer in timeline.transfers:
        of_class[transfer.source // stages].append(transfer)
    transfers = [
        moved(transfer, replica)
        for replica, number in enumerate(classes.class_of)
        for transfer in of_class[number]
    ]
    return schedules.Timeline(
        schedule,
        of_all(timeline.starts),
        of_all(timeline.ends),
        of_all(timeline.peak_bytes),
        of_all(timeline.peak_at),
        tuple(sorted(transfers, key=lambda transfer: transfer.start)),
    )
