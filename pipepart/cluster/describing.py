"""Parses descriptions of devices that are not present: texts such as ``"24GiB@0.5"``, and counts in cluster files."""

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
    """Return the devices of texts, on hosts.

    Args:
        texts: of all devices, of those of one host, which are then in each, or one for all.
        hosts: their number; or numbers of several tiers, the nearest first: ``(4, 2)`` is two groups of four hosts.
        devices_per_host: their number; None for as many as the texts say.

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
    """Return the path of each host: the groups that it is in, from the outermost inward, as in ``"group:1/host:0"``."""
    names = ["host", *["group"] * (len(tiers) - 1)]
    parts = [[f"{name}:{number}" for number in range(size)] for name, size in zip(names, tiers, strict=True)]
    return ["/".join(path) for path in itertools.product(*reversed(parts))]


def expand_counts(text: bytes) -> bytes:
    """Return the JSON of a cluster with its entries for several devices written out.

    An entry of ``devices`` may have ``count``, the devices that it stands for, and ``hosts``, the number of hosts that
    have as many each, one after the other. Their names get the numbers of hosts and devices::

        {"name": "a", "kind": "A100", "count": 2}               a:0, a:1
        {"name": "a", "kind": "A100", "count": 2, "hosts": 2}   host:0/a:0, host:0/a:1, host:1/a:0, host:1/a:1

    What is no cluster comes back as it is, for the checks of the class to find.

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
    """Return the devices that an entry stands for; ``first_host`` is the number of its first host."""
    device = {key: value for key, value in entry.items() if key not in ("count", "hosts")}
    if len(device) == len(entry):
        return [device]
    numbers = range(entry.get("count", 1))
    if "hosts" not in entry:
        return [{**device, "name": f"{device.get('name')}:{number}"} for number in numbers]
    around = f"{device['host']}/" if device.get("host") else ""
    return [
        {**device, "name": f"{host}/{device.get('name')}:{number}", "host": host}
        for host in (f"{around}host:{first_host + index}" for index in range(entry["hosts"]))
        for number in numbers
    ]
