"""The accelerators of this machine, as torch finds them: names, kinds and memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..input_error import InputError
from .devices import Device
from .links import Link

# Assumed until links are measured: peer-to-peer copies over PCIe 4.
REAL_LINK = Link(bandwidth=20e9, latency=20e-6)
# Fraction of an accelerator's memory for its context, library workspaces and fragmentation.
HEADROOM = 0.08


def real_device(
    index: int, devices: Sequence[torch.device], threads: int | None, headroom: float = HEADROOM
) -> Device:
    """Return the device for ``devices[index]``. Entries for the same torch device share its memory evenly.

    Args:
        index: position in the list.
        devices: the torch devices of the cluster.
        threads: intra-operation threads of a CPU device.
        headroom: fraction of an accelerator's memory that stages may not use.

    Raises:
        ValueError: this machine does not have the device, or the headroom is below 0, or 1 or more.
    """
    if not 0 <= headroom < 1:
        raise InputError(f"headroom is a part of the memory, at least 0 and below 1, got {headroom}")
    device = devices[index]
    name = str(device) if devices.count(device) == 1 else f"{device}#{devices[:index].count(device)}"
    present = [accelerator for accelerator in find_accelerators() if accelerator.type == device.type]
    if device not in present and (present or device.type == "cuda"):
        raise InputError(f"there is no {device} here: torch finds {len(present)} {device.type} devices")
    if device.type != "cuda":
        return Device(
            name=name,
            kind=device.type,
            torch_device=str(device),
            threads=threads if device.type == "cpu" else None,
        )
    properties = torch.cuda.get_device_properties(device)
    usable = int(properties.total_memory * (1 - headroom)) // devices.count(device)
    return Device(
        name=name,
        kind=properties.name,
        memory_bytes=usable,
        headroom=headroom,
        torch_device=str(device),
    )


def numbered(device: torch.device) -> torch.device:
    """Return the device with its index, as in ``tensor.device``."""
    return device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)


def find_accelerators() -> list[torch.device]:
    """Return the accelerators of this machine."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # MPS is one device that shares the CPU's memory
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
