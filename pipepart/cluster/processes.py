"""The processes that torchrun started, and the devices and links that they have."""

from __future__ import annotations

import os
import socket
import statistics
import time

import torch
import torch.distributed as dist

from ..ranks import initialize
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
    initialize()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    accelerators = find_accelerators()
    here = accelerators[local % len(accelerators)] if accelerators else torch.device("cpu")
    mine = real_device(0, [here], torch.get_num_threads() if here.type == "cpu" else None, HEADROOM)
    found: list[tuple[str, Device]] = [("", mine)] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), mine))
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
    ranks = {name: [rank for rank, (host, _) in enumerate(found) if host == name] for name in hosts}
    beside = next(((own[0], own[1]) for own in ranks.values() if len(own) > 1), None)
    across = (ranks[hosts[0]][0], ranks[hosts[1]][0]) if several else None
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    link = _measured(beside, group) if beside else Link()
    network = (Network(**_measured(across, group).model_dump()),) if across else ()
    dist.destroy_process_group(group)
    return devices, link, network


def _measured(pair: tuple[int, int], group: dist.ProcessGroup) -> Link:
    """Return the link of two ranks, as messages over gloo have it; median round trips. All ranks call this."""
    one, other = pair
    rank = dist.get_rank()
    times: dict[int, float] = {}
    for size in (8, _BYTES):
        message = torch.zeros(size, dtype=torch.uint8)
        trips = []
        for _ in range(_ROUNDS if rank in pair else 0):
            start = time.perf_counter()
            if rank == one:
                dist.send(message, other, group=group)
                dist.recv(message, other, group=group)
            else:
                dist.recv(message, one, group=group)
                dist.send(message, one, group=group)
            trips.append((time.perf_counter() - start) / 2)
        times[size] = statistics.median(trips) if trips else 0.0
    found = [(0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(found, (times[8], times[_BYTES]), group=group)
    latency, long = found[one]
    return Link(bandwidth=_BYTES / max(long - latency, 1e-9), latency=latency)
