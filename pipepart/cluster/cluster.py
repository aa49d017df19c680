"""Cluster: the devices that a pipeline runs on, and the links between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from ..document import Document
from ..input_error import InputError, InputTypeError
from ..ranks import under_torchrun
from ..units import parse_bandwidth, parse_bytes
from .devices import HEADROOM, Device, describe_devices, find_accelerators, real_devices, virtual_devices
from .links import VIRTUAL_LATENCY_SECONDS, CompressedType, Link, Network, PairLink, make_networks
from .measuring import measure_links
from .places import Places
from .processes import devices_of_processes

# Assumed until links are measured: peer-to-peer copies over PCIe 4.
ASSUMED_LINK = Link(bandwidth=20e9, latency=20e-6)


class Cluster(Document):
    """Devices, and the links between them.

    Attributes:
        kind: of the file.
        devices: at least one device.
        link: the link between any two devices of a host.
        links: links of single device pairs, which replace ``link`` and ``network`` for these pairs.
        network: the networks between hosts, one per tier, from the nearest outward. Two devices are joined by the
            lowest tier that contains both. Empty if there is one host.
        links_from: source of the links: ``"assumed"``, how they were measured, or empty if the user set them.
        emulated: if True, a pipeline on virtual devices slows them down to their speeds, and messages to the speed of
            the links. Otherwise speeds and links only describe the devices to the planner.
        message_seconds: minimum latency of a message between worker threads of this process. ``pipepart.plan`` raises
            it to the latency that the profile measured. Emulated links sleep for the rest of their latency.
        step_seconds: seconds that this process takes to begin and to end a step. ``pipepart.plan`` raises
            it to what the profile measured.
    """

    kind: Literal["cluster"] = "cluster"
    devices: tuple[Device, ...] = Field(min_length=1)
    link: Link = Link()
    links: tuple[PairLink, ...] = ()
    network: tuple[Network, ...] = ()
    links_from: str = ""
    emulated: bool = False
    message_seconds: float = Field(default=VIRTUAL_LATENCY_SECONDS, ge=0, allow_inf_nan=False)
    step_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _devices_and_links_agree(self) -> Self:
        _check_names([device.name for device in self.devices], self.links)
        _check_hosts(self.devices, self.network)
        return self

    @property
    def links_differ(self) -> bool:
        """True if not all pairs of devices have the same link."""
        return self.places.differ

    @property
    def compressed(self) -> dict[str, CompressedType]:
        """Dtypes of compressed messages on the links within hosts (``"link"``) and between hosts (``"network"``)."""
        tiers = [("link", self.link), *(("network", tier) for tier in self.network)]
        return {name: tier.compress.dtype for name, tier in tiers if tier.compress is not None}

    @cached_property
    def places(self) -> Places:
        """Index of devices, hosts and links, for loops over many pairs of devices."""
        return Places(self.devices, self.link, self.links, self.network)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced and its own ``places``."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("places", None)
        return copied

    def link_between(self, sender: str, receiver: str) -> Link:
        """Return the link between two devices, by their names.

        Raises:
            KeyError: no device has one of the names.
        """
        return self.places.link(sender, receiver)

    def __len__(self) -> int:
        return len(self.devices)

    def device(self, name: str) -> Device:
        """Return the device of this name.

        Raises:
            KeyError: no device has this name.
        """
        index = self.places.index.get(name)
        if index is None:
            raise KeyError(
                f"no device {name!r}: the cluster has {_few([device.name for device in self.devices])}"
            )
        return self.devices[index]

    def with_more(self, count: int) -> Self:
        """Return the cluster with ``count`` more devices: copies of the device with the most memory, fastest first.

        Links of single pairs are not copied.

        Raises:
            ValueError: ``count`` is below 1.
        """
        if count < 1:
            raise InputError(f"the number of further devices must be at least 1, got {count}")
        model = max(self.devices, key=lambda device: (device.memory, device.speed))
        names = (f"{model.name} (added {number})" for number in itertools.count(1))
        new = itertools.islice((name for name in names if name not in self.places.index), count)
        added = (model.model_copy(update={"name": name}) for name in new)
        return self.model_copy(update={"devices": (*self.devices, *added)})

    def with_memory(self, memory: int | str) -> Self:
        """Return the cluster with the memory of each device set to ``memory``, as in ``"24GiB"``.

        Raises:
            ValueError: the text is not a size.
        """
        limit = {"memory_bytes": parse_bytes(memory)}
        return self.model_copy(
            update={"devices": tuple(device.model_copy(update=limit) for device in self.devices)}
        )

    @classmethod
    def local(cls, count: int | None = None, *, measure: bool = True, headroom: float = HEADROOM) -> Cluster:
        """Return the accelerators of this machine, or its CPU as one device if there are none.

        The first call in a process measures the links of CUDA devices to each other and to host memory, which takes one
        or two seconds. ``links_from`` says how the links were measured. To plan for the same links again, save the
        cluster.

        Args:
            count: number of accelerators, from the first; None for all.
            measure: False for assumed links.
            headroom: as for :meth:`of`.
        """
        accelerators = find_accelerators()[:count]
        cluster = cls.of(accelerators or ["cpu"], headroom=headroom)
        if not measure or not accelerators or accelerators[0].type != "cuda":
            return cluster
        measured = measure_links(tuple(device.name for device in cluster.devices))
        devices = tuple(
            device.model_copy(update={"host_bandwidth": bandwidth})
            for device, bandwidth in zip(cluster.devices, measured.host_bandwidth, strict=True)
        )
        links = {"link": measured.link, "links": measured.links, "links_from": measured.method}
        return cluster.model_copy(update={"devices": devices, **links})

    @classmethod
    def of_ranks(cls) -> Cluster:
        """Return a cluster with one device per torchrun process, in rank order. Every process must call this.

        The device of a process is the accelerator with its local rank, or the CPU. The links are measured with
        messages between two processes of one host, and between two processes of different hosts.

        Raises:
            RuntimeError: this is the only process.
        """
        if not under_torchrun():
            raise RuntimeError("Cluster.of_ranks() is for several processes: start the script with torchrun")
        devices, link, network = devices_of_processes()
        return cls(devices=devices, link=link, network=network, links_from="measured: messages over gloo")

    @classmethod
    def of(cls, devices: Sequence[torch.device | str], *, headroom: float = HEADROOM) -> Cluster:
        """Return a cluster of torch devices, in order.

        An accelerator listed twice becomes two devices that share its memory. Plans take each for as fast as the whole.

        Args:
            devices: the devices.
            headroom: fraction of an accelerator's memory that stages may not use. It is left for the device's context,
                library workspaces and fragmentation.

        Raises:
            ValueError: ``devices`` is empty, or the headroom is below 0, or 1 or more.
        """
        real = real_devices(devices, headroom)
        all_on_cpu = all(device.torch_device == "cpu" for device in real)
        link = Link(latency=VIRTUAL_LATENCY_SECONDS) if all_on_cpu else ASSUMED_LINK
        return cls(devices=real, link=link, links_from="assumed")

    @classmethod
    def virtual(
        cls,
        count: int,
        *,
        memory: int | str | Sequence[int | str] | None = None,
        threads: int | None = None,
        speed: float | Sequence[float] = 1.0,
        link: float | str | None = None,
        latency: float = VIRTUAL_LATENCY_SECONDS,
        host_link: float | str | None = None,
    ) -> Cluster:
        """Return ``count`` virtual devices: worker threads of this process that share the CPU's memory.

        Slower devices and links are emulated when a pipeline runs on them, so that plans for different devices can be
        tried on one machine: an action takes ``1 / speed`` times as long, a message ``latency + bytes / link``.

        Args:
            count: number of devices.
            memory: memory of each device that the planner may use, or one for all, as in ``"2GiB"``; None for no limit.
            threads: intra-operation threads of each device; by default torch's number divided evenly.
            speed: speed of each device, or one speed for all, relative to this machine; at most 1.
            link: bandwidth between any two devices, as in ``"2GB/s"``; None for no limit.
            latency: seconds per message, at least ``VIRTUAL_LATENCY_SECONDS``.
            host_link: bandwidth between each device and host memory, as in ``"8GB/s"``, which allows stages to offload
                saved tensors; None for no offloading.

        Raises:
            TypeError: ``count`` is not an int.
            ValueError: ``count`` is below 1, a memory or bandwidth cannot be parsed, there are not ``count`` speeds or
                memories, a speed is above 1, or the latency is below ``VIRTUAL_LATENCY_SECONDS``.

        >>> Cluster.virtual(2, speed=[1, 0.5], link="2GB/s").devices[1].speed
        0.5
        """
        devices = virtual_devices(count, memory, threads, speed, host_link)
        if not VIRTUAL_LATENCY_SECONDS <= latency < float("inf"):
            raise InputError(
                f"messages of virtual devices cannot have a latency of {latency} s: threads need "
                f"{VIRTUAL_LATENCY_SECONDS} s for one"
            )
        return cls(
            devices=devices,
            link=Link(bandwidth=None if link is None else parse_bandwidth(link), latency=latency),
            emulated=(
                min(device.speed for device in devices) < 1
                or link is not None
                or host_link is not None
                or latency > VIRTUAL_LATENCY_SECONDS
            ),
        )

    @classmethod
    def parse(
        cls,
        devices: Sequence[str],
        *,
        link: float | str | None = None,
        latency: float = 0.0,
        hosts: int | Sequence[int] = 1,
        devices_per_host: int | None = None,
        network: float | str | Network | Sequence[float | str | Network] | None = None,
        network_latency: float = 0.0,
        host_link: float | str | None = None,
    ) -> Cluster:
        """Parse descriptions of devices, to plan for hardware that is not available.

        Args:
            devices: one text per device: its memory and, after ``@``, its speed relative to the profiled device. With
                several hosts, the texts of one host suffice, or one text for all devices.
            link: bandwidth between any two devices of a host, as in ``"12GB/s"``; None for no limit.
            latency: seconds per message within a host.
            hosts: number of hosts; for several tiers, the size of each tier from the nearest outward: ``(4, 2)`` is two
                groups of four hosts.
            devices_per_host: number of devices of each host; None for the length of ``devices``.
            network: bandwidth of a host's port, which its devices share; one value for each tier. Use
                :class:`Network` to set the number of ports of a host.
            network_latency: seconds per message between hosts.
            host_link: bandwidth between each device and pinned memory of its host, as in ``"25GB/s"``, which allows
                stages to offload saved tensors; None for no offloading.

        Raises:
            ValueError: there are no devices, a text cannot be parsed, or the numbers of devices and tiers do not agree.

        >>> Cluster.parse(["24GiB", "16GiB@0.6"], link="12GB/s").devices[1].speed
        0.6
        >>> two = Cluster.parse(["24GiB"], hosts=2, devices_per_host=8, link="300GB/s", network="25GB/s")
        >>> [two.link_between("device:0", other).bandwidth for other in ("device:7", "device:8")]
        [300000000000.0, 25000000000.0]
        """
        described = describe_devices(devices, hosts, devices_per_host)
        if host_link is not None:
            to_host = {"host_bandwidth": parse_bandwidth(host_link)}
            described = tuple(device.model_copy(update=to_host) for device in described)
        return cls(
            devices=described,
            link=Link(bandwidth=None if link is None else parse_bandwidth(link), latency=latency),
            network=make_networks(network, network_latency, hosts),
        )


def as_cluster(devices: int | Sequence[torch.device | str] | Cluster) -> Cluster:
    """Return the cluster for the argument ``devices``: a number, a list of torch devices, or a cluster.

    A number means accelerators of this machine if there are enough, otherwise virtual devices.

    Raises:
        TypeError: ``devices`` has another type.
        ValueError: the number is below 1.
    """
    if isinstance(devices, Cluster):
        return devices
    if isinstance(devices, int) and not isinstance(devices, bool):
        local = 1 <= devices <= len(find_accelerators())
        return Cluster.local(devices) if local else Cluster.virtual(devices)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return Cluster.of(devices)
    raise InputTypeError(f"devices must be a number, a list of torch devices or a Cluster, got {devices!r}")


def _check_names(names: Sequence[str], links: Sequence[PairLink]) -> None:
    """Check that device names are unique, and that each link joins a different pair of two known devices.

    Raises:
        ValueError: a name occurs twice, or a link joins an unknown device, one device, or a pair that is joined.
    """
    known, joined = set(names), set[frozenset[str]]()
    if len(known) < len(names):
        raise InputError(f"device names must differ, got {_few(names)}")
    for link in links:
        first, second = link.between
        for unknown in {first, second} - known:
            raise InputError(f"a link joins {unknown!r}, the cluster has {_few(names)}")
        if first == second:
            raise InputError(f"a link joins two devices, got {first!r} twice")
        if {first, second} in joined:
            raise InputError(f"two links join {first!r} and {second!r}")
        joined.add(frozenset(link.between))


def _check_hosts(devices: Sequence[Device], network: Sequence[Network]) -> None:
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


def _few(names: Sequence[str]) -> str:
    """Return a text of the list of names, with at most 16 of them."""
    return str(list(names)) if len(names) <= 16 else f"{list(names[:16])} and {len(names) - 16} more"
