"""EmulatedHostLink: the copies of a virtual device to and from the host, at the speed of an emulated link."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..runtime.offload import Copy, CopyQueue
from .transport import Clock


class EmulatedHostLink(CopyQueue):
    """Copies on the device's worker, which sleeps until the link would have carried the copy.

    Args:
        bandwidth: of the link, bytes per second.
        clock: measures and sleeps.
    """

    def __init__(self, bandwidth: float, clock: Clock) -> None:
        self._bandwidth = bandwidth
        self._clock = clock
        self._free_at = 0.0

    def start_out(self, tensors: Sequence[Tensor]) -> Copy:
        return self._queued(super().start_out(tensors))

    def wait(self, copy: Copy) -> None:
        self._clock.sleep_until(copy.done_at)

    def start_back(self, tensors: Sequence[Tensor]) -> Copy:
        return self._queued(super().start_back(tensors))

    def _queued(self, copy: Copy) -> Copy:
        self._free_at = max(self._clock.now(), self._free_at) + _bytes_of(copy.tensors) / self._bandwidth
        copy.done_at = self._free_at
        return copy


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
