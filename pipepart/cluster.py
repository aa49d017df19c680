"""Cluster: the devices that a pipeline runs on, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from pydantic import Field, model_validator

from .document import Document, Value
from .units import parse_bandwidth, parse_bytes

# One hand-off between two worker threads: a message through a queue and the wake-up of a sleeping thread.
VIRTUAL_LATENCY_SECONDS = 20e-6


class Device(Value):
    """One device: its name, memory and speed.

    Attributes:
        name: unique in its cluster, as in ``"virtual:0"`` or ``"cuda:1"``.
        kind: devices of one kind run the same layer in the same time, up to ``speed``.
        memory_bytes: memory that stages may use; None for no limit.
        speed: relative to the device that was profiled: 0.5 takes twice as long.
        torch_device: where its tensors live, as in ``"cuda:0"``; None for a device that is only described.
        threads: intra-operation threads of its worker (CPU devices); None leaves torch's own number.
        host_bandwidth: bytes per second between the device and pinned memory of its host, in each direction, one copy
            at a time; None if it is not known, and stages then keep what they save on the device.
    """

    name: str
    kind: str
    memory_bytes: int | None = Field(default=None, gt=0)
    speed: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    torch_device: str | None = None
    threads: int | None = Field(default=None, ge=1)
    host_bandwidth: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Link(Value):
    """A link between two devices: a transfer takes ``latency + bytes / bandwidth`` seconds."""

    bandwidth: float | None = Field(default=None, gt=0)
    latency: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def seconds(self, size: float) -> float:
        """Return the seconds to move ``size`` bytes once; a bandwidth of None is infinite."""
        return self.latency + (size / self.bandwidth if self.bandwidth else 0.0)


class PairLink(Link):
    """The link of two devices, by their names, the same in both directions."""

    between: tuple[str, str]


class Cluster(Document):
    """Devices, and the links between them.

    Attributes:
        devices: at least one.
        link: the link between any two devices.
        links: links of single pairs, which replace ``link``.
        emulated: if True, a pipeline on virtual devices slows them down to their speeds, and messages to the speed of
            the links. Otherwise speeds and links only describe the devices to the planner.
    """

    devices: tuple[Device, ...] = Field(min_length=1)
    link: Link = Link()
    links: tuple[PairLink, ...] = ()
    emulated: bool = False

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [device.name for device in self.devices]
        if len(set(names)) < len(names):
            raise ValueError(f"device names must differ, got {names}")
        pairs: set[frozenset[str]] = set()
        for link in self.links:
            pair = frozenset(link.between)
            for name in link.between:
                if name not in names:
                    raise ValueError(f"a link joins {name!r}, the cluster has {names}")
            if len(pair) < 2:
                raise ValueError(f"a link joins two devices, got {link.between[0]!r} twice")
            if pair in pairs:
                raise ValueError(f"two links join {link.between[0]!r} and {link.between[1]!r}")
            pairs.add(pair)
        return self

    def link_between(self, one: str, other: str) -> Link:
        """Return the link between two devices, by their names."""
        for link in self.links:
            if {one, other} == set(link.between):
                return link
        return self.link

    def __len__(self) -> int:
        return len(self.devices)

    def device(self, name: str) -> Device:
        """Return the device of this name.

        Raises:
            KeyError: no device has it.
        """
        for device in self.devices:
            if device.name == name:
                return device
        raise KeyError(f"no device {name!r}: the cluster has {[device.name for device in self.devices]}")

    @classmethod
    def local(cls) -> Cluster:
        """Return the accelerators of this machine, or its CPU as one device if there are none."""
        return cls.of(_accelerators() or ["cpu"])

    @classmethod
    def of(cls, devices: Sequence[torch.device | str]) -> Cluster:
        """Return a cluster of these torch devices, in order. A device named twice counts as two in one memory.

        The planner may use 92 % of an accelerator's memory; the rest is for its context and for fragmentation.

        Raises:
            ValueError: no device is named.
        """
        if not devices:
            raise ValueError("a cluster needs at least 1 device, got none")
        real = [_numbered(torch.device(device)) for device in devices]
        on_cpu = sum(device.type == "cpu" for device in real)
        threads = max(1, torch.get_num_threads() // on_cpu) if on_cpu else None
        return cls(
            devices=tuple(_real_device(index, real, threads) for index in range(len(real))),
            link=_REAL_LINK if on_cpu < len(real) else Link(latency=VIRTUAL_LATENCY_SECONDS),
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
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"the number of virtual devices must be an int, got {count!r}")
        if count < 1:
            raise ValueError(f"a cluster needs at least 1 device, got {count}")
        speeds = [float(one) for one in speed] if isinstance(speed, Sequence) else [float(speed)] * count
        if len(speeds) != count:
            raise ValueError(f"speed names {len(speeds)} devices, there are {count}")
        for index, one in enumerate(speeds):
            if not 0 < one <= 1:
                raise ValueError(
                    f"virtual device {index} cannot have speed {one}: 1 is that of this machine, and it can be slowed "
                    "down only; give the fastest device 1 and the others what they are of it"
                )
        if not VIRTUAL_LATENCY_SECONDS <= latency < float("inf"):
            raise ValueError(
                f"messages of virtual devices cannot have a latency of {latency} s: threads need "
                f"{VIRTUAL_LATENCY_SECONDS} s for one"
            )
        limit = None if memory is None else parse_bytes(memory)
        share = threads or max(1, torch.get_num_threads() // count)
        host_bandwidth = None if host_link is None else parse_bandwidth(host_link)
        return cls(
            devices=tuple(
                Device(
                    name=f"virtual:{index}",
                    kind="cpu",
                    memory_bytes=limit,
                    speed=own,
                    torch_device="cpu",
                    threads=share,
                    host_bandwidth=host_bandwidth,
                )
                for index, own in enumerate(speeds)
            ),
            link=Link(bandwidth=None if link is None else parse_bandwidth(link), latency=latency),
            emulated=(
                min(speeds) < 1
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
        host_link: float | str | None = None,
    ) -> Cluster:
        """Parse descriptions of devices, to plan for hardware that is not available.

        Args:
            devices: one text per device: its memory and, after ``@``, its speed relative to the profiled device.
            link: bandwidth between any two devices, as in ``"12GB/s"``; None for no limit.
            latency: seconds per message.
            host_link: bandwidth between each device and pinned memory of its host, as in ``"25GB/s"``, so that stages
                may keep there what they save; None for devices that cannot.

        Raises:
            ValueError: there are no devices, or a text cannot be parsed.

        >>> Cluster.parse(["24GiB", "16GiB@0.6"], link="12GB/s").devices[1].speed
        0.6
        """
        if not devices:
            raise ValueError("a cluster needs at least 1 device, got none")
        to_host = None if host_link is None else parse_bandwidth(host_link)
        return cls(
            devices=tuple(_described_device(index, text, to_host) for index, text in enumerate(devices)),
            link=Link(bandwidth=None if link is None else parse_bandwidth(link), latency=latency),
        )


# Peer-to-peer copies over PCIe 4: an assumption until links are measured.
_REAL_LINK = Link(bandwidth=20e9, latency=20e-6)
# The rest of an accelerator's memory is for its context, libraries' workspaces and fragmentation.
_USABLE_MEMORY = 0.92


def _real_device(index: int, devices: Sequence[torch.device], threads: int | None) -> Device:
    device = devices[index]
    name = str(device) if devices.count(device) == 1 else f"{device}#{devices[:index].count(device)}"
    found = [one for one in _accelerators() if one.type == device.type]
    if device not in found and (found or device.type == "cuda"):
        raise ValueError(f"there is no {device} here: torch finds {len(found)} {device.type} devices")
    if device.type != "cuda":
        share = threads if device.type == "cpu" else None
        return Device(name=name, kind=device.type, torch_device=str(device), threads=share)
    properties = torch.cuda.get_device_properties(device)
    usable = int(properties.total_memory * _USABLE_MEMORY) // devices.count(device)
    return Device(name=name, kind=properties.name, memory_bytes=usable, torch_device=str(device))


def _numbered(device: torch.device) -> torch.device:
    """Return the device with its index, as ``tensor.device`` has it."""
    return device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)


def _accelerators() -> list[torch.device]:
    """Return the accelerators of this machine."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # which is one device, with the CPU's memory
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def _described_device(index: int, text: str, host_bandwidth: float | None) -> Device:
    memory, _, speed = text.partition("@")
    try:
        factor = float(speed) if speed else 1.0
    except ValueError:
        raise ValueError(
            f"device {index}, {text!r}: {speed!r} is not a speed, write for example '16GiB@0.6'"
        ) from None
    if not 0 < factor < float("inf"):
        raise ValueError(f"device {index}, {text!r}: the speed must be positive, got {factor}")
    return Device(
        name=f"device:{index}",
        kind="described",
        memory_bytes=parse_bytes(memory),
        speed=factor,
        host_bandwidth=host_bandwidth,
    )


def as_cluster(devices: int | Sequence[torch.device | str] | Cluster) -> Cluster:
    """Return a cluster for a number of accelerators (or virtual devices), a list of torch devices, or a cluster.

    Raises:
        TypeError: something else.
        ValueError: a number below 1.
    """
    if isinstance(devices, Cluster):
        return devices
    if isinstance(devices, bool) or not isinstance(devices, int | Sequence) or isinstance(devices, str):
        raise TypeError(f"devices must be a number, a list of torch devices or a Cluster, got {devices!r}")
    if not isinstance(devices, int):
        return Cluster.of(devices)
    if 1 <= devices <= len(_accelerators()):
        return Cluster.of(_accelerators()[:devices])
    return Cluster.virtual(devices)
