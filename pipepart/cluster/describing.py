"""Parses descriptions of devices: texts such as ``"24GiB@0.5"``, and cluster file entries for several devices."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

from ..input_error import InputError
from ..units import counted, is_count
from .devices import Device, described_device


def describe_devices(
    texts: Sequence[str], hosts: int | Sequence[int], devices_per_host: int | None
) -> tuple[Device, ...]:
    """Return the devices that texts describe, placed on hosts.

    Args:
        texts: one text for all devices, one per device of a host, or one per device of the cluster.
        hosts: number of hosts; for several tiers, the size of each from the nearest outward: ``(4, 2)`` is two groups
            of four hosts.
        devices_per_host: number of devices of each host; None for the number of texts.

    Raises:
        ValueError: there are no devices, a text cannot be parsed, or the numbers do not agree.
    """
    if not texts:
        raise InputError("a cluster needs at least 1 device, got none")
    tiers = [hosts] if isinstance(hosts, int) else list(hosts)
    if not tiers or not all(map(is_count, tiers)):
        raise InputError(f"hosts must be a number of at least 1, or several of them, got {hosts!r}")
    if devices_per_host is not None and not is_count(devices_per_host):
        raise InputError(f"devices_per_host must be a whole number of at least 1, got {devices_per_host!r}")
    count, each = math.prod(tiers), devices_per_host or len(texts)
    if len(texts) not in (1, each, each * count):
        raise InputError(
            f"{counted(len(texts), 'device')} for {counted(count, 'host')} with {counted(each, 'device')} each: "
            f"describe 1, {each} or {each * count}"
        )
    described = [described_device(index, text) for index, text in enumerate(texts)]
    paths = _host_paths(tiers) if count > 1 else [""]
    return tuple(
        described[number % len(texts)].model_copy(
            update={"name": f"device:{number}", "host": paths[number // each]}
        )
        for number in range(each * count)
    )


def _host_paths(tiers: Sequence[int]) -> list[str]:
    """Return the path of each host: its groups from the outermost inward, then the host, as in ``"group:1/host:0"``."""
    names = ["host", *["group"] * (len(tiers) - 1)]
    parts = [[f"{name}:{number}" for number in range(size)] for name, size in zip(names, tiers, strict=True)]
    return ["/".join(path) for path in itertools.product(*reversed(parts))]


def expand_counts(text: bytes) -> bytes:
    """Return the JSON of a cluster in which each entry of ``devices`` describes one device.

    In the input, an entry may have ``count``, the number of devices per host, and ``hosts``, the number of hosts. The
    names of these devices get the numbers of host and device::

        {"name": "a", "kind": "A100", "count": 2}               a:0, a:1
        {"name": "a", "kind": "A100", "count": 2, "hosts": 2}   host:0/a:0, host:0/a:1, host:1/a:0, host:1/a:1

    A text that is not a cluster is returned unchanged; the validation of :class:`Cluster` reports its faults.

    Raises:
        ValueError: a count is not a number of at least 1.
    """
    try:
        fields = json.loads(text)
        entries = [dict(entry) for entry in fields["devices"]]
    except (ValueError, TypeError, KeyError):
        return text
    devices: list[dict[str, Any]] = []
    hosts = 0
    for number, entry in enumerate(entries):
        for key in ("count", "hosts"):
            if not is_count(entry.get(key, 1)):
                raise InputError(
                    f"devices.{number}.{key}: must be a number of at least 1, got {entry[key]!r}"
                )
        devices += _expanded(entry, hosts)
        hosts += entry.get("hosts", 0)
    return json.dumps({**fields, "devices": devices}).encode()


def _expanded(entry: dict[str, Any], first_host: int) -> list[dict[str, Any]]:
    """Return one entry per device that an entry describes; ``first_host`` is the number of its first host."""
    device = {key: value for key, value in entry.items() if key not in ("count", "hosts")}
    if len(device) == len(entry):
        return [device]
    numbers = range(entry.get("count", 1))
    if "hosts" not in entry:
        return [{**device, "name": f"{device.get('name')}:{number}"} for number in numbers]
    group = f"{device['host']}/" if device.get("host") else ""
    return [
        {**device, "name": f"{host}/{device.get('name')}:{number}", "host": host}
        for host in (f"{group}host:{first_host + index}" for index in range(entry["hosts"]))
        for number in numbers
    ]
