"""Finds the device of each torchrun process, and measures the links between processes."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from ..ranks import Ranks, initialize
from .devices import Device, find_accelerators, real_devices
from .links import Link, Network

_BYTES = 4 * 2**20  # size of the messages that measure the bandwidth
_ROUNDS = 7  # round trips of each size


def devices_of_processes() -> tuple[tuple[Device, ...], Link, tuple[Network, ...]]:
    """Return one device per process, in rank order, and the measured links between them. All processes must call this.

    The device of a process is the accelerator with its local rank, or the CPU. The link within a host is measured
    between two processes of one host, the link between hosts between the first processes of two hosts.
    """
    ranks = Ranks(initialize())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    accelerators = find_accelerators()
    device = accelerators[local_rank % len(accelerators)] if accelerators else torch.device("cpu")
    gathered: list[tuple[str, Device]] = ranks.gather((socket.gethostname(), *real_devices([device])))
    ranks_of: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(gathered):
        ranks_of.setdefault(host, []).append(rank)
    hosts = list(ranks_of)
    several = len(hosts) > 1
    devices = tuple(
        device.model_copy(
            update={
                "name": f"rank{rank}:{device.name}",
                "host": f"host:{hosts.index(host)}" if several else "",
            }
        )
        for rank, (host, device) in enumerate(gathered)
    )
    within = next((members[:2] for members in ranks_of.values() if len(members) > 1), None)
    link = _measured(within, ranks) if within else Link()
    network: tuple[Network, ...] = ()
    if several:
        between = [ranks_of[host][0] for host in hosts[:2]]
        network = (Network(**_measured(between, ranks).model_dump()),)
    ranks.close("the links are measured")
    return devices, link, network


def _measured(pair: Sequence[int], ranks: Ranks) -> Link:
    """Measure the link between two ranks by round trips of messages over gloo. All ranks must call this."""
    times: list[float] = []
    for size in (8, _BYTES):
        trips: list[float] = []
        ranks.run(partial(_round_trips, pair, ranks, size, trips))
        times.append(statistics.median(trips) if trips else 0.0)
    latency, long = ranks.gather(tuple(times))[pair[0]]
    return Link.from_seconds(_BYTES, latency, long)


def _round_trips(pair: Sequence[int], ranks: Ranks, size: int, trips: list[float]) -> None:
    """Append half the seconds of each round trip of messages of ``size`` bytes to ``trips``."""
    first, second = pair
    there, back = ranks.groups[first < second], ranks.groups[second < first]
    message = torch.zeros(size, dtype=torch.uint8)
    for _ in range(_ROUNDS if ranks.rank in pair else 0):
        start = time.perf_counter()
        if ranks.rank == first:
            dist.send(message, second, group=there)
            dist.recv(message, second, group=back)
        else:
            dist.recv(message, first, group=there)
            dist.send(message, first, group=back)
        trips.append((time.perf_counter() - start) / 2)
