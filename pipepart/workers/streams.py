"""Streams of accelerators: which devices have them, and how a thread is put on some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_WITHOUT_STREAMS = frozenset({"mps"})  # all there is runs in one order


def has_streams(device: torch.device) -> bool:
    """Return True if a device runs its work on streams, behind the host."""
    return device.type != "cpu" and device.type not in _WITHOUT_STREAMS


@contextmanager
def on_streams(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Puts the calling thread on these streams, within the block; it is on the device of the last of them then.

    A stream itself is a block of this sort, but for one thread at a time.
    """
    index = torch.accelerator.current_device_index()
    before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    try:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        yield
    finally:
        for stream in before:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(index)
