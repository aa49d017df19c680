"""Simulated asynchronous devices: a test double for several GPUs, in CPU memory.

``load`` registers them with torch as ``vdev:0``, ``vdev:1``, ... Mixing tensors of two devices raises, as on GPUs.
Each device has its own generator, streams, events and autograd thread, counts its memory, and can be given a memory
limit. The CPU's kernels compute, so the values are those of the CPU. Inside ``delayed`` the streams run late and in an
order drawn from a seed: a program that forgets to wait for a stream reads NaN or old values.

    devices.load(devices=2)
    model = torch.nn.Linear(4, 4).to("vdev:1")
    with devices.delayed(seed=0):
        y = model(torch.ones(2, 4, device="vdev:1"))  # queued
        print(y.sum().item())  # the host waits for it
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from tests.vdev import device_module
from tests.vdev.build import built, reason_unavailable

__all__ = ["Memory", "delayed", "hide", "load", "memory", "reason_unavailable", "reset_peak", "set_capacity"]

_loading = threading.Lock()
_backend: ModuleType | None = None


class Memory(NamedTuple):
    """Bytes that tensors requested on a device: now, and the most since ``reset_peak``."""

    allocated: int
    peak: int


def load(devices: int = 8) -> None:
    """Registers so many devices, for as long as the process lives; ``torch.accelerator`` finds them from then on.

    Compiled at the first use on a machine, which takes a minute or two. No backward may be running meanwhile.
    """
    global _backend
    with _loading:
        if _backend is None:
            reason = reason_unavailable()
            if reason:
                raise RuntimeError(f"virtual devices are not available: {reason}")
            backend = built()
            backend.register_devices(devices)
            device_module.install(backend)
            backend.start_autograd_threads(devices)
            _backend = backend
        device_module.show(True)


def hide() -> None:
    """Lets ``torch.accelerator.is_available()`` say no again, until the next ``load``; tensors stay usable."""
    device_module.show(False)


def memory(device: torch.device | str) -> Memory:
    return Memory(*_loaded().memory(_index(device)))


def reset_peak(device: torch.device | str) -> None:
    """Lets the peaks of the device start from what it holds now."""
    _loaded().reset_peak(_index(device))


def set_capacity(device: torch.device | str, bytes: int | None) -> None:
    """Limits the memory of a device: beyond it ``torch.OutOfMemoryError`` is raised; None for no limit."""
    _loaded().set_capacity(_index(device), bytes)


@contextlib.contextmanager
def delayed(seed: int = 0, *, lateness: float | None = None) -> Iterator[None]:
    """Lets the streams of all devices run late and out of step; at the end all is waited for.

    An operator is queued on the current stream of its device, and runs when the streams get there: after each launch
    a generator draws which streams go on and how far. Of two streams only events order one after the other. Freed
    memory is handed out again at once, on the stream on which it was allocated. What the host reads it waits for; what
    it reads of a copy that it did not wait for, and all memory before its first use, is NaN. Launches of a single
    thread run in the same order whenever the seed is the same.

    Args:
        seed: of that generator.
        lateness: 0 for a stream that never lags, 1 for one that runs only when something waits for it; by default each
            stream's is drawn, and drawn again now and then.

    Raises:
        RuntimeError: the streams are delayed already; or, at the end, a queued operator failed and nobody was told.
    """
    backend = _loaded()
    backend.enter_delay(seed, lateness)
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # what failed first is on its way already
            backend.leave_delay()
        raise
    backend.leave_delay()


def _loaded() -> ModuleType:
    if _backend is None:
        raise RuntimeError("there are no virtual devices yet: call tests.vdev.devices.load() first")
    return _backend


def _index(device: torch.device | str) -> int:
    index = torch.device(device).index
    assert index is not None, device
    return index
