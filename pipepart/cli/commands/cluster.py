"""``pipepart cluster``: show or describe the devices and links that plans are made for."""

from __future__ import annotations

from typing import Annotated

from .. import options
from ..errors import UsageError
from ..options import option


def cluster_command(
    devices: options.Devices = None,
    cluster: options.Cluster = None,
    described: options.Described = None,
    bandwidth: options.Bandwidth = None,
    hosts: Annotated[
        int, option("N", "Number of hosts with the devices given by --device.", min=1, group="Devices")
    ] = 1,
    devices_per_host: Annotated[
        int | None,
        option("N", "Devices of each host; as many as --device says if not given.", min=1, group="Devices"),
    ] = None,
    network: Annotated[
        str | None,
        option("RATE", "Of a host's port to the network: 25GB/s.", group="Devices"),
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Show the devices and links of this machine, of a file, or as described; --output saves them as a file.

    Without options: the accelerators of this machine, with their links measured, or its CPU.
    """
    from ...cluster import Cluster
    from ...reporting import cluster_report
    from ..devices import make_cluster
    from ..output import check_writable, deliver

    check_writable(output)
    if (hosts > 1 or devices_per_host or network or bandwidth) and not described:
        raise UsageError(
            "--bandwidth, --hosts, --devices-per-host and --network go with devices described by --device"
        )
    if (hosts > 1) != bool(network):
        raise UsageError("--hosts N and --network 25GB/s go together: hosts are joined by a network")
    if described and not (devices or cluster):
        result = Cluster.parse(
            described, link=bandwidth, hosts=hosts, devices_per_host=devices_per_host, network=network
        )
    elif devices or cluster or described:
        result = make_cluster(devices, cluster, described or (), bandwidth)
    else:
        result = Cluster.local()
    deliver(result, lambda: [cluster_report(result)], as_json=as_json, path=output)
