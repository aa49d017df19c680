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

A virtual device has no such stream. Its worker copies, at OFFLOAD and at RELOAD; if its link to the host is emulated,
it sleeps until the link would have carried the copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...autograd import graph_cut
from ...autograd.own_copy import own_copy
from ...planning import Plan
from ...workers.streams import Wait, has_streams, recorded, waits
from ..emulation import emulation
from ..emulation.transport import Clock
from ..transport.cuda import Streams


@dataclass
class Copy:
    """A copy under way.

    Attributes:
        tensors: the copies; of a copy that has not begun, the originals.
        done: an event behind it on the copy stream; None on a virtual device.
        done_at: when an emulated link has carried it, in the clock's seconds.
    """

    tensors: Sequence[Tensor]
    done: torch.Event | None = None
    done_at: float = 0.0


class CopyQueue(ABC):
    """The copies of one device. Called by the device's worker."""

    @abstractmethod
    def start_out(self, tensors: Sequence[Tensor]) -> Copy:
        """Begin to copy tensors to the host, behind what makes them. They must be kept until ``finish_out``."""

    @abstractmethod
    def wait(self, copy: Copy) -> None:
        """Let what the worker computes from now on wait for the end of a copy."""

    @abstractmethod
    def finish_out(self, copy: Copy) -> Sequence[Tensor]:
        """Return the tensors on the host, after ``wait``."""

    @abstractmethod
    def start_back(self, tensors: Sequence[Tensor]) -> Copy:
        """Begin to copy tensors of the host to the device. They are usable after ``wait``."""


class VirtualCopyQueue(CopyQueue):
    """The copies of a virtual device.

    Args:
        bandwidth: of the emulated link, bytes per second; None to emulate none.
        clock: measures and sleeps.
    """

    def __init__(self, bandwidth: float | None, clock: Clock | None = None) -> None:
        self._bandwidth = bandwidth
        self._clock = clock or emulation.HOST_CLOCK
        self._free_at = 0.0

    def start_out(self, tensors: Sequence[Tensor]) -> Copy:
        return self._queued(tensors)

    def wait(self, copy: Copy) -> None:
        self._clock.sleep_until(copy.done_at)

    def finish_out(self, copy: Copy) -> Sequence[Tensor]:
        return own_copy(copy.tensors, graph_cut.emulated.to_host or Tensor.clone)

    def start_back(self, tensors: Sequence[Tensor]) -> Copy:
        bring = graph_cut.emulated.bring
        return self._queued(own_copy(tensors) if bring is None else bring(tensors))

    def _queued(self, tensors: Sequence[Tensor]) -> Copy:
        if self._bandwidth is None:
            return Copy(tensors)
        self._free_at = max(self._clock.now(), self._free_at) + _bytes_of(tensors) / self._bandwidth
        return Copy(tensors, done_at=self._free_at)


class StreamCopyQueue(CopyQueue):
    """The copies of an accelerator.

    Args:
        device: the accelerator.
        stream: of the copies.
    """

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
            queues.append(VirtualCopyQueue(device.host_bandwidth if plan.cluster.emulated else None))
    return queues


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that :func:`own_copy` copies: of each storage the range that the tensors use."""
    ranges: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        first = tensor.data_ptr()
        end = first + (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
        key = tensor.untyped_storage()._cdata
        start, stop = ranges.get(key, (first, end))
        ranges[key] = min(first, start), max(end, stop)
    return sum(end - first for first, end in ranges.values())
