"""Checks that the links, hosts and networks of a cluster fit its devices."""

from __future__ import annotations

from collections.abc import Sequence

from ..input_error import InputError
from .devices import Device
from .links import Network, PairLink


def check_names(names: Sequence[str], links: Sequence[PairLink]) -> None:
    """Check that names of devices differ, and that each link joins two of them which no other link joins.

    Raises:
        ValueError: not so.
    """
    known = set(names)
    if len(known) < len(names):
        raise InputError(f"device names must differ, got {few(names)}")
    pairs: set[frozenset[str]] = set()
    for link in links:
        pair = frozenset(link.between)
        for name in link.between:
            if name not in known:
                raise InputError(f"a link joins {name!r}, the cluster has {few(names)}")
        if len(pair) < 2:
            raise InputError(f"a link joins two devices, got {link.between[0]!r} twice")
        if pair in pairs:
            raise InputError(f"two links join {link.between[0]!r} and {link.between[1]!r}")
        pairs.add(pair)


def check_hosts(devices: Sequence[Device], network: Sequence[Network]) -> None:
    """Check that the host of each device has a part for each tier of the network, or all devices one host.

    Raises:
        ValueError: not so.
    """
    first, tiers = devices[0], len(network)
    for device in devices:
        if network and (device.host.count("/") + 1 != tiers or not device.host):
            example = "/".join(["group:0"] * (tiers - 1) + ["host:0"])
            raise InputError(
                f"device {device.name!r} is in host {device.host!r}: with a network of {tiers} tiers write it as in "
                f"{example!r}"
            )
        if not network and device.host != first.host:
            raise InputError(
                f"devices {first.name!r} and {device.name!r} are in hosts {first.host!r} and {device.host!r}: say "
                "what joins them with network"
            )


def few(names: Sequence[str]) -> str:
    """Return the names as a list, or the first 16 of more."""
    return str(list(names)) if len(names) <= 16 else f"{list(names[:16])} and {len(names) - 16} more"
