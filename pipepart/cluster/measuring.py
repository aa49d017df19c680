"""Measures the links between accelerators, and between each accelerator and host memory, by timing copies."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from .links import Link, PairLink

TimeCopy = Callable[[str, str, int], float]  # source, target, bytes -> seconds of one copy
HOST = "host"  # as the source or target of a copy: pinned host memory

_SHORT, _LONG = 2**12, 2**26  # bytes of the timed copies
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
        time_copy(source, target, _SHORT)  # the first copy sets up the connection
        short, long = (
            statistics.median(time_copy(source, target, size) for _ in range(_REPEATS))
            for size in (_SHORT, _LONG)
        )
        return Link.from_seconds(_LONG, short, long)

    def slower_way(first: str, second: str) -> Link:
        return max(one_way(first, second), one_way(second, first), key=lambda link: link.seconds(_LONG))

    pairs = [PairLink(between=pair, **dict(slower_way(*pair))) for pair in itertools.combinations(names, 2)]
    return MeasuredLinks(
        *_common_link(pairs),
        host_bandwidth=tuple(slower_way(name, HOST).bandwidth for name in names),
        method=f"measured: median of {_REPEATS} copies of {_SHORT} and of {_LONG} bytes",
    )


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
