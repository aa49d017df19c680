"""Virtual devices: worker threads that share the CPU and emulate devices of any speed and memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..input_error import InputError, InputTypeError
from ..units import parse_bandwidth, parse_bytes
from .devices import Device


def virtual_devices(
    count: int,
    memory: int | str | Sequence[int | str] | None,
    threads: int | None,
    speed: float | Sequence[float],
    host_link: float | str | None,
) -> tuple[Device, ...]:
    """Return virtual devices; arguments as for :meth:`pipepart.Cluster.virtual`.

    Raises:
        TypeError: ``count`` is not an int.
        ValueError: ``count`` is below 1, a memory or bandwidth cannot be parsed, there are not ``count`` speeds or
            memories, or a speed is above 1.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise InputTypeError(f"the number of virtual devices must be an int, got {count!r}")
    if count < 1:
        raise InputError(f"a cluster needs at least 1 device, got {count}")
    speeds = [float(value) for value in speed] if isinstance(speed, Sequence) else [float(speed)] * count
    if len(speeds) != count:
        raise InputError(f"speed names {len(speeds)} devices, there are {count}")
    for index, device_speed in enumerate(speeds):
        if not 0 < device_speed <= 1:
            raise InputError(
                f"virtual device {index} cannot have speed {device_speed}: 1 is that of this machine, and it can be "
                "slowed down only; give the fastest device 1 and the others what they are of it"
            )
    memories = [memory] * count if memory is None or isinstance(memory, int | str) else list(memory)
    if len(memories) != count:
        raise InputError(f"memory names {len(memories)} devices, there are {count}")
    host_bandwidth = None if host_link is None else parse_bandwidth(host_link)
    return tuple(
        Device(
            name=f"virtual:{index}",
            kind="cpu",
            memory_bytes=None if limit is None else parse_bytes(limit),
            speed=device_speed,
            torch_device="cpu",
            threads=threads or max(1, torch.get_num_threads() // count),
            host_bandwidth=host_bandwidth,
        )
        for index, (device_speed, limit) in enumerate(zip(speeds, memories, strict=True))
    )
