"""Measures the links of accelerators by timing copies, once for each machine, and keeps them in the user's cache."""

from __future__ import annotations

import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ..document import Document
from .links import Link, PairLink

TimeCopy = Callable[[str, str, int], float]  # seconds to copy bytes from a device to another
HOST = "host"  # as the end of a copy: pinned memory

_SIZES = tuple(2**power for power in (16, 20, 23, 26))
_REPEATS = 5
_ALIKE = 0.1  # links that differ by less are one


class MeasuredLinks(Document):
    """The measured links of a machine.

    Attributes:
        devices: names and kinds of the accelerators, in order.
        software: the versions of torch and of the driver.
        pairs: the link of each pair of devices, the slower of both directions.
        host_bandwidth: bytes per second between each device and pinned memory, the slower of both directions.
        method: how they were measured.
    """

    devices: tuple[tuple[str, str], ...]
    software: str
    pairs: tuple[PairLink, ...]
    host_bandwidth: tuple[float | None, ...]
    method: str


def local_links(
    devices: Sequence[tuple[str, str]], *, again: bool = False, time_copy: TimeCopy | None = None
) -> MeasuredLinks:
    """Return the links of accelerators: from the cache, or measured now and written there.

    Args:
        devices: name and kind of each.
        again: True to measure even if the cache has them.
        time_copy: times one copy; None for copies by torch.
    """
    software = f"torch {torch.__version__}, driver {_driver()}"
    key = hashlib.sha256(repr((tuple(devices), software)).encode()).hexdigest()[:16]
    path = cache_folder() / f"links-{key}.json"
    if not again:
        try:
            return MeasuredLinks.load(path)
        except (OSError, ValueError):
            pass
    found = _measured(devices, software, time_copy or copy_seconds)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
    except OSError:  # a folder that cannot be written: they are measured again the next time
        pass
    return found


def cache_folder() -> Path:
    """Return the folder of the user's cache for this package."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pipepart"


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Return the link whose times are nearest, by least squares relative to each time.

    >>> fit_link([1000, 2000, 4000], [2.0, 3.0, 5.0])
    Link(bandwidth=1000.0, latency=1.0, compress=None)
    """
    # Minimise the sum of ((latency + size * per_byte) / time - 1)²; scaled, as the two units differ by 1e9.
    rows = np.column_stack([np.ones(len(sizes)), np.array(sizes) / 1e9]) / np.array(seconds)[:, None]
    latency, per_gigabyte = np.linalg.lstsq(rows, np.ones(len(sizes)))[0]
    if latency < 0:
        latency, per_gigabyte = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    per_byte = per_gigabyte / 1e9
    if per_byte <= 0:
        return Link(latency=statistics.median(seconds))
    return Link(bandwidth=float(f"{1 / per_byte:.4g}"), latency=float(f"{latency:.3g}"))


def common_link(pairs: Sequence[PairLink]) -> tuple[Link, tuple[PairLink, ...]]:
    """Return the link of most pairs, and the pairs whose bandwidth differs from it by more than a tenth."""
    if not pairs:
        return Link(), ()
    rates = [pair.bandwidth or float("inf") for pair in pairs]
    middle = statistics.median_low(rates)
    usual = pairs[rates.index(middle)]
    others = tuple(
        pair for pair, rate in zip(pairs, rates, strict=True) if abs(rate - middle) > _ALIKE * middle
    )
    return Link(bandwidth=usual.bandwidth, latency=usual.latency), others


def copy_seconds(source: str, target: str, size: int) -> float:
    """Return the seconds of one copy between two torch devices, or a device and the pinned memory of the host."""
    made = _bytes_on(source, size)
    there = _bytes_on(target, size)
    devices = [torch.device(name) for name in (source, target) if name != HOST]
    for device in devices:
        torch.accelerator.synchronize(device)
    begin = time.perf_counter()
    there.copy_(made, non_blocking=True)
    for device in devices:
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin


def _measured(devices: Sequence[tuple[str, str]], software: str, time_copy: TimeCopy) -> MeasuredLinks:
    def link(source: str, target: str) -> Link:
        time_copy(source, target, _SIZES[0])  # the first copy sets up the connection
        medians = [
            statistics.median(time_copy(source, target, size) for _ in range(_REPEATS)) for size in _SIZES
        ]
        return fit_link(_SIZES, medians)

    def slower(one: str, other: str) -> Link:
        return max(link(one, other), link(other, one), key=lambda found: found.seconds(_SIZES[-1]))

    names = [name for name, _ in devices]
    pairs = tuple(
        PairLink(between=(one, other), **dict(slower(one, other)))
        for one, other in itertools.combinations(names, 2)
    )
    to_host = tuple(slower(name, HOST).bandwidth for name in names)
    method = f"median of {_REPEATS} copies of {_SIZES[0]} to {_SIZES[-1]} bytes, {software}"
    return MeasuredLinks(
        devices=tuple(devices), software=software, pairs=pairs, host_bandwidth=to_host, method=method
    )


def _bytes_on(name: str, size: int) -> torch.Tensor:
    if name == HOST:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8, device=name)


def _driver() -> str:
    if not torch.cuda.is_available():
        return "none"
    return str(torch._C._cuda_getDriverVersion())  # pyright: ignore[reportAttributeAccessIssue]
