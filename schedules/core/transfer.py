"""Transfer: start and end of a message between devices, or of a copy between a device and its host."""

from __future__ import annotations

from typing import NamedTuple

from .action import Kind


class Transfer(NamedTuple):
    """A message from a stage to one on another device, simulated or measured.

    It is taken when the action that it is for starts, which may be long after it has arrived.

    kind: F for the output of a stage, B for a gradient, REDUCE_GRAD for the gradients of a copy of the model; OFFLOAD
        and RELOAD for the copy of a stash to the host and back.
    source, target: the stages that send and receive it; the same one for a copy of a stash.
    micro_batch: None for what belongs to no one micro-batch.
    start, end: seconds, on the clock of the timeline: when it was sent, and when it had arrived.
    bytes: its size.
    """

    kind: Kind
    source: int
    target: int
    micro_batch: int | None
    start: float
    end: float
    bytes: float = 0
