"""Copies tensors between a device and host memory, one copy at a time, in parallel with computation.

On an accelerator the copies have a stream of their own, and the host memory is pinned. The host never waits::

    compute stream    F(s, k)                  OFFLOAD(s, k) ...   RELOAD(s, k)                       B(s, k)
                      event (1)                wait (2), free      allocate, event (3)                wait (4)
                         └──▶ copy stream:  y ──▶ host                └──▶ copy stream:  host ──▶ y'     ▲
                                               │        ▲                                  └─────────────┘
                                               └ event ─┘ (2)

Memory of the device is allocated and freed in the order of the compute stream, so it needs no holds: it is reused only
behind (2), and overwritten only behind (3). Torch's allocator keeps pinned memory for the next copy, and waits with it
for the copies under way.

A CPU has no such stream. Its worker copies, at OFFLOAD and at RELOAD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...autograd import graph_cut
from ...autograd.own_copy import own_copy
from ...planning import Plan
from ...workers.streams import Wait, has_streams, recorded, waits
from ..transport.cuda import Streams


@dataclass
class Copy:
    """A copy under way.

    Attributes:
        tensors: the copies; of a copy that has not begun, the originals.
        done: an event behind it on the copy stream; None on a CPU.
        done_at: when an emulated link has carried it, in seconds of its clock.
    """

    tensors: Sequence[Tensor]
    done: torch.Event | None = None
    done_at: float = 0.0


class CopyQueue:
    """The copies of one device. Called by the device's worker.

    This is the queue of a CPU, whose stages have the host's memory: each copy is one within that.
    """

    def start_out(self, tensors: Sequence[Tensor]) -> Copy:
        """Begin to copy tensors to the host, behind what makes them. They must be kept until ``finish_out``."""
        return Copy(tensors)

    def wait(self, copy: Copy) -> None:
        """Let what the worker computes from now on wait for the end of a copy."""

    def finish_out(self, copy: Copy) -> Sequence[Tensor]:
        """Return the tensors on the host, after ``wait``."""
        return own_copy(copy.tensors, graph_cut.emulated.to_host or Tensor.clone)

    def start_back(self, tensors: Sequence[Tensor]) -> Copy:
        """Begin to copy tensors of the host to the device. They are usable after ``wait``."""
        bring = graph_cut.emulated.bring
        return Copy(own_copy(tensors) if bring is None else bring(tensors))


class StreamCopyQueue(CopyQueue):
    """The copies of an accelerator, on a stream of their own."""

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device = device
        self._stream = stream

    def start_out(self, tensors: Sequence[Tensor]) -> Copy:
        compute = torch.accelerator.current_stream(self._device)
        waits.wait(Wait.OFFLOAD_BEHIND_COMPUTE, self._stream, compute.record_event())  # (1)
        torch.accelerator.set_stream(self._stream)
        try:
            on_host = own_copy(tensors, lambda tensor: tensor.to("cpu", non_blocking=True))
        finally:
            torch.accelerator.set_stream(compute)
        return Copy(on_host, recorded(self._stream))

    def wait(self, copy: Copy) -> None:
        assert copy.done is not None
        is_out = copy.tensors[0].device.type == "cpu"
        place = Wait.COMPUTE_BEHIND_OFFLOAD if is_out else Wait.COMPUTE_BEHIND_RELOAD
        waits.wait(place, torch.accelerator.current_stream(self._device), copy.done)  # (2) or (4)

    def finish_out(self, copy: Copy) -> Sequence[Tensor]:
        return copy.tensors

    def start_back(self, tensors: Sequence[Tensor]) -> Copy:
        compute = torch.accelerator.current_stream(self._device)
        pairs: list[tuple[Tensor, Tensor]] = []

        def allocated(tensor: Tensor) -> Tensor:
            pairs.append((torch.empty_like(tensor, device=self._device), tensor))
            return pairs[-1][0]

        on_device = own_copy(tensors, allocated)
        waits.wait(Wait.RELOAD_BEHIND_COMPUTE, self._stream, compute.record_event())  # (3)
        torch.accelerator.set_stream(self._stream)
        try:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        finally:
            torch.accelerator.set_stream(compute)
        return Copy(on_device, recorded(self._stream))


def copy_queues(plan: Plan, streams: Streams | None) -> list[CopyQueue]:
    """Return the queue of each worker of a plan; none if no stage offloads."""
    if all(stage.offload == "never" for stage in plan.stages):
        return []
    queues: list[CopyQueue] = []
    for number, device in enumerate(plan.workers):
        home = torch.device(device.torch_device or "cpu")
        if streams is not None and number in streams.local and has_streams(home):
            queues.append(StreamCopyQueue(home, streams.of_host_copies(number)))
        else:
            queues.append(CopyQueue())
    return queues
