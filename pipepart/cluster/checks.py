"""Checks that the links, hosts and networks of a cluster fit its devices."""

from __future__ import annotations

from collections.abc import Sequence

from ..input_error import InputError
from .devices import Device
from .links import Network, PairLink


def check_names(names: Sequence[str], links: Sequence[PairLink]) -> None:
    """Check that device names are unique, and that each link joins a different pair of two known devices.

    Raises:
        ValueError: a name occurs twice, or a link joins an unknown device, one device, or a pair that is joined.
    """
    known, joined = set(names), set[frozenset[str]]()
    if len(known) < len(names):
        raise InputError(f"device names must differ, got {few(names)}")
    for link in links:
        first, second = link.between
        for unknown in {first, second} - known:
            raise InputError(f"a link joins {unknown!r}, the cluster has {few(names)}")
        if first == second:
            raise InputError(f"a link joins two devices, got {first!r} twice")
        if {first, second} in joined:
            raise InputError(f"two links join {first!r} and {second!r}")
        joined.add(frozenset(link.between))


def check_hosts(devices: Sequence[Device], network: Sequence[Network]) -> None:
    """Check that each host name has one part per tier of the network; without a network, that there is one host.

    Raises:
        ValueError: a host name has another number of parts, or several hosts have no network.
    """
    first, tiers = devices[0], len(network)
    for device in devices:
        parts = len(device.host.split("/")) if device.host else 0
        if network and parts != tiers:
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
    """Return a text of the list of names, with at most 16 of them."""
    return str(list(names)) if len(names) <= 16 else f"{list(names[:16])} and {len(names) - 16} more"
