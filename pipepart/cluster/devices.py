"""Device: its name, memory, speed and host."""

from __future__ import annotations

from pydantic import Field

from ..document import Value
from ..input_error import InputError
from ..units import parse_bytes


class Device(Value):
    """One device: its name, memory and speed.

    Attributes:
        name: unique in its cluster, as in ``"virtual:0"`` or ``"cuda:1"``.
        kind: devices of one kind run the same layer in the same time, up to ``speed``.
        memory_bytes: memory that stages may use; None for no limit.
        headroom: part of an accelerator's memory that ``memory_bytes`` leaves free, for its context and fragmentation.
        speed: relative to the device that was profiled: 0.5 takes twice as long.
        torch_device: where its tensors live, as in ``"cuda:0"``; None for a device that is only described.
        threads: intra-operation threads of its worker (CPU devices); None leaves torch's own number.
        host_bandwidth: bytes per second between the device and pinned memory of its host, in each direction, one copy
            at a time; None if it is not known, and stages then keep what they save on the device.
        action_seconds: what the runtime adds to each action of a stage. ``pipepart.plan`` raises it to what the profile
            measured, for CPU devices of this machine.
        host: of the machine that it is in, as in ``"host:0"``; with groups of hosts, as in ``"rack:1/host:0"``.
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
    memory, at, speed = text.partition("@")
    try:
        factor = float(speed) if at else 1.0
    except ValueError:
        raise InputError(
            f"device {index}, {text!r}: {speed!r} is not a speed, write for example '16GiB@0.6'"
        ) from None
    if not 0 < factor < float("inf"):
        raise InputError(f"device {index}, {text!r}: the speed must be positive, got {factor}")
    return Device(name=f"device:{index}", kind="described", memory_bytes=parse_bytes(memory), speed=factor)
