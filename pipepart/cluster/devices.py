"""Device: the name, memory, speed and host of a device; makes accelerators, virtual and described devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from pydantic import Field

from ..document import Value
from ..input_error import InputError, InputTypeError
from ..units import counted, is_count, parse_bandwidth, parse_bytes

# Fraction of an accelerator's memory for its context, library workspaces and fragmentation.
HEADROOM = 0.08


class Device(Value):
    """A device that runs stages.

    Attributes:
        name: unique name in the cluster, as in ``"virtual:0"`` or ``"cuda:1"``.
        kind: hardware model. Devices of one kind and ``speed`` run the same layer in the same time.
        memory_bytes: memory that stages may use; None for no limit.
        headroom: fraction of an accelerator's memory that ``memory_bytes`` leaves free, for its context and
            fragmentation.
        speed: speed relative to the profiled device: 0.5 takes twice as long.
        torch_device: torch device of its tensors, as in ``"cuda:0"``; None for a device that is only described.
        threads: intra-operation threads of its worker (CPU devices); None for torch's default.
        host_bandwidth: bytes per second between the device and pinned memory of its host, in each direction, one copy
            at a time. If None, stages do not offload saved tensors to the host.
        action_seconds: seconds that the runtime adds to each action of a stage. ``pipepart.plan`` raises it to the
            value that the profile measured, for CPU devices of this machine.
        host: name of the host that contains the device, as in ``"host:0"``; with groups of hosts, as in
            ``"rack:1/host:0"``.
    """

    name: str
    kind: str
    memory_bytes: int | None = Field(default=None, gt=0)
    headroom: float = Field(default=0.0, ge=0, lt=1)
    speed: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    torch_device: str | None = None
    threads: int | None = Field(default=None, ge=1)
    host_bandwidth: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    action_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    host: str = ""

    @property
    def memory(self) -> float:
        """``memory_bytes``; infinity for no limit."""
        return math.inf if self.memory_bytes is None else float(self.memory_bytes)


def find_accelerators() -> list[torch.device]:
    """Return the accelerators of this machine."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # MPS is one device that shares the CPU's memory
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def real_devices(names: Sequence[torch.device | str], headroom: float = HEADROOM) -> tuple[Device, ...]:
    """Return torch devices of this machine. Entries for the same torch device share its memory, or threads, evenly.

    Args:
        names: at least one torch device.
        headroom: fraction of an accelerator's memory that stages may not use.

    Raises:
        ValueError: ``names`` is empty, this machine lacks a device, or the headroom is below 0, or 1 or more.
    """
    if not names:
        raise InputError("a cluster needs at least 1 device, got none")
    if not 0 <= headroom < 1:
        raise InputError(f"headroom is a part of the memory, at least 0 and below 1, got {headroom}")
    devices = [torch.device(name) for name in names]
    devices = [
        device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)
        for device in devices
    ]
    on_cpu = sum(device.type == "cpu" for device in devices)
    accelerators = find_accelerators()
    real: list[Device] = []
    for index, device in enumerate(devices):
        count = devices.count(device)
        name = str(device) if count == 1 else f"{device}#{devices[:index].count(device)}"
        present = [accelerator for accelerator in accelerators if accelerator.type == device.type]
        if device not in present and (present or device.type == "cuda"):
            raise InputError(f"there is no {device} here: torch finds {len(present)} {device.type} devices")
        entry = Device(name=name, kind=device.type, torch_device=str(device))
        if device.type == "cpu":
            entry = entry.model_copy(update={"threads": max(1, torch.get_num_threads() // on_cpu)})
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            usable = int(properties.total_memory * (1 - headroom)) // count
            limits = {"kind": properties.name, "memory_bytes": usable, "headroom": headroom}
            entry = entry.model_copy(update=limits)
        real.append(entry)
    return tuple(real)


def virtual_devices(
    count: int,
    memory: int | str | Sequence[int | str] | None,
    threads: int | None,
    speed: float | Sequence[float],
    host_link: float | str | None,
) -> tuple[Device, ...]:
    """Return virtual devices; arguments and errors as for :meth:`pipepart.Cluster.virtual`."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise InputTypeError(f"the number of virtual devices must be an int, got {count!r}")
    if count < 1:
        raise InputError(f"a cluster needs at least 1 device, got {count}")
    speeds = [float(value) for value in speed] if isinstance(speed, Sequence) else [float(speed)] * count
    memories = [memory] * count if memory is None or isinstance(memory, int | str) else list(memory)
    for name, values in (("speed", speeds), ("memory", memories)):
        if len(values) != count:
            raise InputError(f"{name} names {len(values)} devices, there are {count}")
    for index, device_speed in enumerate(speeds):
        if not 0 < device_speed <= 1:
            raise InputError(
                f"virtual device {index} cannot have speed {device_speed}: 1 is that of this machine, and it can be "
                "slowed down only; give the fastest device 1 and the others what they are of it"
            )
    return tuple(
        Device(
            name=f"virtual:{index}",
            kind="cpu",
            memory_bytes=None if limit is None else parse_bytes(limit),
            speed=device_speed,
            torch_device="cpu",
            threads=threads or max(1, torch.get_num_threads() // count),
            host_bandwidth=None if host_link is None else parse_bandwidth(host_link),
        )
        for index, (device_speed, limit) in enumerate(zip(speeds, memories, strict=True))
    )


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
    described = [_described_device(index, text) for index, text in enumerate(texts)]
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


def _described_device(index: int, text: str) -> Device:
    """Return the device that a text describes: its memory and, after ``@``, its speed.

    Raises:
        ValueError: the text cannot be parsed.
    """
    memory, separator, speed = text.partition("@")
    try:
        factor = float(speed) if separator else 1.0
    except ValueError:
        raise InputError(
            f"device {index}, {text!r}: {speed!r} is not a speed, write for example '16GiB@0.6'"
        ) from None
    if not 0 < factor < float("inf"):
        raise InputError(f"device {index}, {text!r}: the speed must be positive, got {factor}")
    return Device(name=f"device:{index}", kind="described", memory_bytes=parse_bytes(memory), speed=factor)
