"""The processes that torchrun started, and the devices and links that they have."""

from __future__ import annotations

import os
import socket
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

from ..ranks import Ranks, initialize
from .devices import Device
from .links import Link, Network
from .real_devices import HEADROOM, find_accelerators, real_device

_BYTES = 4 * 2**20  # of a message whose time gives the bandwidth
_ROUNDS = 7


def devices_of_processes() -> tuple[tuple[Device, ...], Link, tuple[Network, ...]]:
    """Return one device a process, by rank, and the links between them, measured. All processes call this.

    Each process brings the accelerator of its number on its host, or the CPU. A link within a host, and one between two
    hosts, are measured between the first two processes that it joins.
    """
    ranks = Ranks(initialize())
    local = int(os.environ.get("LOCAL_RANK", "0"))
    accelerators = find_accelerators()
    here = accelerators[local % len(accelerators)] if accelerators else torch.device("cpu")
    mine = real_device(0, [here], torch.get_num_threads() if here.type == "cpu" else None, HEADROOM)
    found: list[tuple[str, Device]] = ranks.gather((socket.gethostname(), mine))
    hosts = list(dict.fromkeys(host for host, _ in found))
    several = len(hosts) > 1
    devices = tuple(
        device.model_copy(
            update={
                "name": f"rank{rank}:{device.name}",
                "host": f"host:{hosts.index(host)}" if several else "",
            }
        )
        for rank, (host, device) in enumerate(found)
    )
    ranks_of = {name: [rank for rank, (host, _) in enumerate(found) if host == name] for name in hosts}
    beside = next(((own[0], own[1]) for own in ranks_of.values() if len(own) > 1), None)
    across = (ranks_of[hosts[0]][0], ranks_of[hosts[1]][0]) if several else None
    link = _measured(beside, ranks) if beside else Link()
    network = (Network(**_measured(across, ranks).model_dump()),) if across else ()
    ranks.close("the links are measured")
    return devices, link, network


def _measured(pair: tuple[int, int], ranks: Ranks) -> Link:
    """Return the link of two ranks, as messages over gloo have it; median round trips. All ranks call this."""
    times: dict[int, float] = {}
    for size in (8, _BYTES):
        trips: list[float] = []
        ranks.run(partial(_round_trips, pair, ranks, size, trips))
        times[size] = statistics.median(trips) if trips else 0.0
    latency, long = ranks.gather((times[8], times[_BYTES]))[pair[0]]
    return Link(bandwidth=_BYTES / max(long - latency, 1e-9), latency=latency)


def _round_trips(pair: tuple[int, int], ranks: Ranks, size: int, trips: list[float]) -> None:
    """Append the seconds that messages of so many bytes take in one direction."""
    one, other = pair
    there, back = ranks.groups[one < other], ranks.groups[other < one]
    message = torch.zeros(size, dtype=torch.uint8)
    for _ in range(_ROUNDS if ranks.rank in pair else 0):
        start = time.perf_counter()
        if ranks.rank == one:
            dist.send(message, other, group=there)
            dist.recv(message, other, group=back)
        else:
            dist.recv(message, one, group=there)
            dist.send(message, one, group=back)
        trips.append((time.perf_counter() - start) / 2)
