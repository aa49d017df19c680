"""Parses descriptions of devices, texts such as ``"24GiB@0.5"``, and places the devices on hosts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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
