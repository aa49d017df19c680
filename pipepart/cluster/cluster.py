"""Cluster: the devices that a pipeline runs on, and the links between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from ..document import Document
from ..input_error import InputError
from ..ranks import under_torchrun
from ..units import parse_bandwidth, parse_bytes
from .checks import check_hosts, check_names, few
from .describing import describe_devices, expand_counts
from .devices import Device
from .links import VIRTUAL_LATENCY_SECONDS, CompressedType, Link, Network, PairLink, make_networks
from .measuring import MeasuredLinks, common_link, local_links
from .places import Places, Route
from .processes import devices_of_processes
from .real_devices import HEADROOM, REAL_LINK, find_accelerators, numbered, real_device
from .virtual_devices import virtual_devices


class Cluster(Document):
    """Devices, and the links between them.

    Attributes:
        devices: at least one.
        link: the link between any two devices of a host.
        links: links of single pairs, which replace all others.
        network: what joins the hosts; of several tiers the nearest first. Two devices are joined by the lowest tier
            that has both. Empty if there is one host.
        links_from: how the links are known: ``"assumed"``, measured in some way, or empty if they were given.
        emulated: if True, a pipeline on virtual devices slows them down to their speeds, and messages to the speed of
            the links. Otherwise speeds and links only describe the devices to the planner.
        message_seconds: what a message between the worker threads of this process takes at the least. ``pipepart.plan``
            raises it to what the profile measured. Emulated links sleep for the rest of their latency.
    """

    devices: tuple[Device, ...] = Field(min_length=1)
    link: Link = Link()
    links: tuple[PairLink, ...] = ()
    network: tuple[Network, ...] = ()
    links_from: str = ""
    emulated: bool = False
    message_seconds: float = Field(default=VIRTUAL_LATENCY_SECONDS, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _devices_and_links_agree(self) -> Self:
        check_names([device.name for device in self.devices], self.links)
        check_hosts(self.devices, self.network)
        return self

    @property
    def links_differ(self) -> bool:
        """True if not all pairs of devices have the same link."""
        return self.places.differ

    @property
    def compressed(self) -> dict[str, CompressedType]:
        """How messages are compressed on the links within hosts, ``"link"``, and between them, ``"network"``."""
        tiers = [("link", self.link), *(("network", tier) for tier in self.network)]
        return {name: tier.compress.dtype for name, tier in tiers if tier.compress is not None}

    @cached_property
    def places(self) -> Places:
        """Where the devices are; loops over many pairs of devices take links from here."""
        return Places(self.devices, self.link, self.links, self.network)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced, which looks its devices up anew."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("places", None)
        return copied

    def link_between(self, one: str, other: str) -> Link:
        """Return the link between two devices, by their names.

        Raises:
            KeyError: no device has a name.
        """
        return self.places.link(one, other)

    def route_between(self, one: str, other: str) -> Route:
        """Return the ports of hosts that a message from one device to another passes, and the bandwidth of each."""
        return self.places.route(one, other)

    def __len__(self) -> int:
        return len(self.devices)

    def device(self, name: str) -> Device:
        """Return the device of this name.

        Raises:
            KeyError: no device has it.
        """
        found = self.places.index.get(name)
        if found is None:
            raise KeyError(
                f"no device {name!r}: the cluster has {few([device.name for device in self.devices])}"
            )
        return self.devices[found]

    def with_more(self, count: int, like: str | None = None) -> Self:
        """Return the cluster with further devices behind its own.

        Args:
            count: of devices to add.
            like: the name of the device that they are like, in the same host; None for the one with most memory, and of
                those the fastest. Links of single pairs do not count for them.

        Raises:
            KeyError: no device has this name.
            ValueError: ``count`` is below 1.
        """
        if count < 1:
            raise InputError(f"the number of further devices must be at least 1, got {count}")
        if like is None:
            model = max(self.devices, key=lambda one: (one.memory_bytes or float("inf"), one.speed))
        else:
            model = self.device(like)
        known = {device.name for device in self.devices}
        names = (
            name for number in itertools.count(1) if (name := f"{model.name} (added {number})") not in known
        )
        added = (model.model_copy(update={"name": name}) for name in itertools.islice(names, count))
        return self.model_copy(update={"devices": (*self.devices, *added)})

    def with_memory(self, memory: int | str) -> Self:
        """Return the cluster with this memory for each of its devices, as in ``"24GiB"``.

        Raises:
            ValueError: the text is no size.
        """
        limit = {"memory_bytes": parse_bytes(memory)}
        return self.model_copy(
            update={"devices": tuple(one.model_copy(update=limit) for one in self.devices)}
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a cluster that :meth:`save` wrote, or one written by hand.

        An entry of ``devices`` may stand for several: ``{"name": "gpu", "kind": "A100", "count": 8, "hosts": 2}`` are
        eight devices in each of two hosts.

        Raises:
            ValueError: the file is no cluster of this version. The message lists every fault.
            OSError: the file cannot be read.
        """
        try:
            text = expand_counts(Path(path).read_bytes())
        except ValueError as error:
            raise InputError(f"{path} is no cluster that this version reads:\n  {error}") from None
        return cls._read(text, path)

    @classmethod
    def local(
        cls,
        count: int | None = None,
        *,
        measure: bool | Literal["again"] = True,
        headroom: float = HEADROOM,
    ) -> Cluster:
        """Return the accelerators of this machine, or its CPU as one device if there are none.

        The links of CUDA devices, and those to the host's memory, are measured the first time (a second or two) and
        kept in the user's cache folder for these devices, driver and version of torch. ``links_from`` says how.

        Args:
            count: take the first accelerators only; None for all.
            measure: False to assume the links; ``"again"`` to measure them even if the cache has them.
            headroom: as for :meth:`of`.
        """
        found = find_accelerators()[:count]
        cluster = cls.of(found or ["cpu"], headroom=headroom)
        if not measure or not found or found[0].type != "cuda":
            return cluster
        return cluster.with_links(
            local_links([(one.name, one.kind) for one in cluster.devices], again=measure == "again")
        )

    @classmethod
    def of_ranks(cls) -> Cluster:
        """Return one device a process under torchrun, in the order of the ranks; every process calls this.

        A process has the accelerator of its number on its host, or the CPU. The links are measured as messages have
        them, between two processes of a host and of two hosts.

        Raises:
            RuntimeError: this is the only process.
        """
        if not under_torchrun():
            raise RuntimeError("Cluster.of_ranks() is for several processes: start the script with torchrun")
        devices, link, network = devices_of_processes()
        return cls(devices=devices, link=link, network=network, links_from="measured: messages over gloo")

    def with_links(self, measured: MeasuredLinks) -> Self:
        """Return the cluster with measured links between its devices, and between each and its host."""
        link, links = common_link(measured.pairs)
        rates = dict(zip((name for name, _ in measured.devices), measured.host_bandwidth, strict=True))
        devices = tuple(
            one.model_copy(update={"host_bandwidth": rates.get(one.name, one.host_bandwidth)})
            for one in self.devices
        )
        measured_so = f"measured: {measured.method}"
        return self.model_copy(
            update={"devices": devices, "link": link, "links": links, "links_from": measured_so}
        )

    @classmethod
    def of(cls, devices: Sequence[torch.device | str], *, headroom: float = HEADROOM) -> Cluster:
        """Return a cluster of these torch devices, in order. A device named twice counts as two in one memory.

        Args:
            devices: the devices.
            headroom: part of the memory of an accelerator that stages may not use: it is for the device's context,
                the workspaces of libraries and fragmentation.

        Raises:
            ValueError: no device is named, or the headroom is not at least 0 and below 1.
        """
        if not devices:
            raise InputError("a cluster needs at least 1 device, got none")
        real = [numbered(torch.device(device)) for device in devices]
        on_cpu = sum(device.type == "cpu" for device in real)
        threads = max(1, torch.get_num_threads() // on_cpu) if on_cpu else None
        return cls(
            devices=tuple(real_device(index, real, threads, headroom) for index in range(len(real))),
            link=REAL_LINK if on_cpu < len(real) else Link(latency=VIRTUAL_LATENCY_SECONDS),
            links_from="assumed",
        )

    @classmethod
    def virtual(
        cls,
        count: int,
        *,
        memory: int | str | None = None,
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
            memory: memory of each that the planner may use, as in ``"2GiB"``; None for no limit.
            threads: intra-operation threads of each; by default torch's number shared out evenly.
            speed: speed of each, or one for all, relative to this machine; at most 1.
            link: bandwidth between any two devices, as in ``"2GB/s"``; None for no limit.
            latency: seconds per message; at least the time that threads need for one.
            host_link: bandwidth between each device and the memory of the host, as in ``"8GB/s"``, so that stages may
                keep there what they save; None for devices that cannot.

        Raises:
            TypeError: ``count`` is not an int.
            ValueError: ``count`` is below 1, a memory or bandwidth cannot be parsed, there are not ``count`` speeds, a
                speed is above 1, or the latency is below that of threads.

        >>> Cluster.virtual(2, speed=[1, 0.5], link="2GB/s").devices[1].speed
        0.5
        """
        made = virtual_devices(count, memory, threads, speed, host_link)
        if not VIRTUAL_LATENCY_SECONDS <= latency < float("inf"):
            raise InputError(
                f"messages of virtual devices cannot have a latency of {latency} s: threads need "
                f"{VIRTUAL_LATENCY_SECONDS} s for one"
            )
        return cls(
            devices=made,
            link=Link(bandwidth=None if link is None else parse_bandwidth(link), latency=latency),
            emulated=(
                min(device.speed for device in made) < 1
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
                several hosts the devices of one host, or one text for all, are enough.
            link: bandwidth between any two devices of a host, as in ``"12GB/s"``; None for no limit.
            latency: seconds per message within a host.
            hosts: their number; or, for several tiers, numbers from the nearest outward: ``(4, 2)`` is two groups of
                four hosts.
            devices_per_host: their number; None for as many as ``devices`` has.
            network: bandwidth of a host's port, which its devices share; one number for each tier. A
                :class:`Network` says how many ports a host has.
            network_latency: seconds per message between hosts.
            host_link: bandwidth between each device and pinned memory of its host, as in ``"25GB/s"``, so that stages
                may keep there what they save; None for devices that cannot.

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
