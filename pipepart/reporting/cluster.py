"""Formats a cluster: its hosts with their devices, and the links of each tier."""

from __future__ import annotations

from collections import Counter, defaultdict

from rich.console import RenderableType

from ..cluster import Cluster, Device, Link, Network
from ..units import counted, format_bytes, format_seconds
from .table import labelled_lines

_MOST_LINES = 16


def cluster_report(cluster: Cluster) -> RenderableType:
    """Return lines for the devices of each host (alike hosts in one line) and for the links of each tier."""
    hosts: dict[str, Counter[str]] = defaultdict(Counter)
    for device in cluster.devices:
        hosts[device.host][_described(device)] += 1
    alike: dict[str, list[str]] = defaultdict(list)
    for host, counts in hosts.items():
        alike["; ".join(f"{count} × {text}" for text, count in counts.items())].append(host)
    lines = [(_hosts(names), devices) for devices, names in alike.items()]
    lines = [*lines[:_MOST_LINES], *([("...", "")] if len(lines) > _MOST_LINES else [])]
    lines.append(
        ("link", f"{_link(cluster.link)} between two devices{' of a host' if cluster.network else ''}")
    )
    for tier, network in enumerate(cluster.network):
        what = "hosts" if not tier else "groups of hosts"
        lines.append(
            (f"network {tier}" if tier else "network", f"{_link(network)} between {what}, {_ports(network)}")
        )
    lines += [(" and ".join(link.between), _link(link)) for link in cluster.links[:_MOST_LINES]]
    if len(cluster.links) > _MOST_LINES:
        lines.append(("...", f"{len(cluster.links) - _MOST_LINES} more links of single pairs"))
    if cluster.links_from:
        lines.append(("links are", cluster.links_from))
    return labelled_lines(f"Cluster of {counted(len(cluster), 'device')}", lines)


def _hosts(names: list[str]) -> str:
    if names == [""]:
        return "devices"
    return names[0] if len(names) == 1 else f"{names[0]} and {counted(len(names) - 1, 'host')} like it"


def _described(device: Device) -> str:
    memory = "" if device.memory_bytes is None else f", {format_bytes(device.memory_bytes)}"
    speed = "" if device.speed == 1 else f", speed {device.speed:g}"
    host = "" if device.host_bandwidth is None else f", {_rate(device.host_bandwidth)} to its host"
    return f"{device.kind}{memory}{speed}{host}"


def _link(link: Link) -> str:
    rate = "no limit" if link.bandwidth is None else _rate(link.bandwidth)
    compressed = f", activations and gradients as {link.compress.dtype}" if link.compress else ""
    return (
        f"{rate}, {format_seconds(link.latency)} latency{compressed}" if link.latency else rate + compressed
    )


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def _ports(network: Network) -> str:
    return "one port for all devices of each" if network.ports == 1 else f"{network.ports} ports each"
