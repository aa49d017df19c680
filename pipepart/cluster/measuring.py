"""Measures the links between accelerators, and between each accelerator and host memory, by timing copies."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from .links import Link, PairLink

TimeCopy = Callable[[str, str, int], float]  # source, target, bytes -> seconds of one copy
HOST = "host"  # as the source or target of a copy: pinned host memory

_SIZES = tuple(2**power for power in (16, 20, 23, 26))  # bytes of the timed copies
_REPEATS = 5  # copies of each size
_TOLERANCE = 0.1  # relative difference up to which bandwidths count as equal


class MeasuredLinks(NamedTuple):
    """The measured links of a machine.

    Attributes:
        link: the link of most pairs of devices.
        links: the pairs whose bandwidth differs from that of ``link`` by more than a tenth.
        host_bandwidth: bytes per second between each device and pinned memory, in the slower direction.
        method: a description of the measurement.
    """

    link: Link
    links: tuple[PairLink, ...]
    host_bandwidth: tuple[float | None, ...]
    method: str


def copy_seconds(source: str, target: str, size: int) -> float:
    """Return the seconds of a copy between two torch devices, or a device and pinned host memory."""
    original, copy = _bytes_on(source, size), _bytes_on(target, size)
    devices = [torch.device(name) for name in (source, target) if name != HOST]
    _wait(devices)
    begin = time.perf_counter()
    copy.copy_(original, non_blocking=True)
    _wait(devices)
    return time.perf_counter() - begin


@cache
def measure_links(names: tuple[str, ...], time_copy: TimeCopy = copy_seconds) -> MeasuredLinks:
    """Measure the links of accelerators once per process; each link is that of the slower direction.

    Args:
        names: torch names of the accelerators.
        time_copy: times one copy.
    """

    def one_way(source: str, target: str) -> Link:
        time_copy(source, target, _SIZES[0])  # the first copy sets up the connection
        medians = [
            statistics.median(time_copy(source, target, size) for _ in range(_REPEATS)) for size in _SIZES
        ]
        return fit_link(_SIZES, medians)

    def slower_way(first: str, second: str) -> Link:
        return max(one_way(first, second), one_way(second, first), key=lambda link: link.seconds(_SIZES[-1]))

    pairs = [PairLink(between=pair, **dict(slower_way(*pair))) for pair in itertools.combinations(names, 2)]
    return MeasuredLinks(
        *_common_link(pairs),
        host_bandwidth=tuple(slower_way(name, HOST).bandwidth for name in names),
        method=f"measured: median of {_REPEATS} copies of {_SIZES[0]} to {_SIZES[-1]} bytes",
    )


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fit latency and bandwidth to the seconds of copies by least squares on relative errors.

    >>> fit_link([1000, 2000, 4000], [2.0, 3.0, 5.0])
    Link(bandwidth=1000.0, latency=1.0, compress=None)
    """
    # Minimise the sum of ((latency + size * per_byte) / time - 1)²; scaled, as the two units differ by 1e9.
    rows = np.column_stack([np.ones(len(sizes)), np.array(sizes) / 1e9]) / np.array(seconds)[:, None]
    latency, per_gigabyte = np.linalg.lstsq(rows, np.ones(len(sizes)))[0]
    if latency < 0:
        latency, per_gigabyte = 0.0, rows[:, 1].sum() / np.square(rows[:, 1]).sum()
    if per_gigabyte <= 0:
        return Link(latency=statistics.median(seconds))
    return Link(bandwidth=float(f"{1e9 / per_gigabyte:.4g}"), latency=float(f"{latency:.3g}"))


def _common_link(pairs: Sequence[PairLink]) -> tuple[Link, tuple[PairLink, ...]]:
    """Return the link with the median bandwidth, and the pairs whose bandwidth differs by more than a tenth."""
    if not pairs:
        return Link(), ()

    def bandwidth(pair: PairLink) -> float:
        return pair.bandwidth or math.inf

    median = sorted(pairs, key=bandwidth)[(len(pairs) - 1) // 2]
    limit = _TOLERANCE * bandwidth(median)
    unlike = tuple(pair for pair in pairs if abs(bandwidth(pair) - bandwidth(median)) > limit)
    return Link(bandwidth=median.bandwidth, latency=median.latency), unlike


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.accelerator.synchronize(device)


def _bytes_on(name: str, size: int) -> torch.Tensor:
    if name == HOST:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8, device=name)
