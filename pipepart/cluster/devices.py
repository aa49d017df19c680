"""Device: the name, memory, speed and host of a device."""

from __future__ import annotations

from pydantic import Field

from ..document import Value
from ..input_error import InputError
from ..units import parse_bytes


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


def described_device(index: int, text: str) -> Device:
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
