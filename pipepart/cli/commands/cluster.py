"""``pipepart cluster``: show or describe the devices and links that plans are made for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from .. import options
from ..errors import UsageError, with_exit_status
from ..options import option


@with_exit_status
def cluster_command(
    devices: Annotated[
        str | None,
        option("N|NAMES", "A number of devices, or names as in cuda:0,cuda:1.", group="This machine"),
    ] = None,
    cluster: Annotated[
        Path | None, option("FILE", "A cluster as JSON; it may be written by hand.", group="Described")
    ] = None,
    device: Annotated[
        list[str] | None,
        option(
            "SIZE[@SPEED]",
            "Describe a device, as in 24GiB or 16GiB@0.6; once for each, or for all.",
            options.described,
            group="Described",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        option("RATE", "Between devices given by --device: 12GB/s.", options.rate, group="Described"),
    ] = None,
    hosts: Annotated[
        int, option("N", "Number of hosts with the devices given by --device.", min=1, group="Described")
    ] = 1,
    devices_per_host: Annotated[
        int | None,
        option("N", "Devices of each host; as many as --device says if not given.", min=1, group="Described"),
    ] = None,
    network: Annotated[
        str | None,
        option("RATE", "Of a host's port to the network: 25GB/s.", options.rate, group="Described"),
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
    if (hosts > 1 or devices_per_host or network or bandwidth) and not device:
        raise UsageError(
            "--bandwidth, --hosts, --devices-per-host and --network go with devices described by --device"
        )
    if (hosts > 1) != bool(network):
        raise UsageError("--hosts N and --network 25GB/s go together: hosts are joined by a network")
    if device and not (devices or cluster):
        found = Cluster.parse(
            device, link=bandwidth, hosts=hosts, devices_per_host=devices_per_host, network=network
        )
    elif devices or cluster or device:
        found = make_cluster(devices, cluster, device or (), bandwidth)
    else:
        found = Cluster.local()
    deliver(found.model_dump_json(indent=1), lambda: [cluster_report(found)], as_json=as_json, path=output)
