"""Times work while other programs use little of the processor, as far as possible."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

TRIES = 5
TOLERATED_SHARE = 0.1
"""Of one core, that others may take while work is timed."""
TICK_SECONDS = 0.01
"""The finest that the kernel tells, and so what short work may be off by."""

_STATISTICS = Path("/proc/stat")
# user, nice, system, irq, softirq, steal: what ran here, or what the host gave to others.
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """What the work returned, its wall and CPU seconds, and the CPU seconds that others took meanwhile."""

    result: T
    wall_seconds: float
    cpu_seconds: float
    foreign_seconds: float

    @property
    def disturbed(self) -> bool:
        return self.foreign_seconds > max(2 * TICK_SECONDS, TOLERATED_SHARE * self.wall_seconds)


def undisturbed(
    work: Callable[[], T], *, cpu_seconds: Callable[[], float] = time.process_time, tries: int = TRIES
) -> Measurement[T]:
    """Does `work` until nobody disturbed it, `tries` times at most; then the least disturbed one counts.

    `cpu_seconds` tells what the processes that do the work have used so far.
    """
    taken = []
    for _ in range(tries):
        taken.append(_timed(work, cpu_seconds))
        if not taken[-1].disturbed:
            return taken[-1]
    return min(taken, key=lambda one: one.foreign_seconds / one.wall_seconds)


def _timed(work: Callable[[], T], cpu_seconds: Callable[[], float]) -> Measurement[T]:
    busy, cpu, start = busy_seconds(), cpu_seconds(), time.perf_counter()
    result = work()
    wall = time.perf_counter() - start
    cpu = cpu_seconds() - cpu
    return Measurement(result, wall, cpu, max(0.0, busy_seconds() - busy - cpu))


def busy_seconds() -> float:
    """CPU seconds of the whole machine since its start, in clock ticks; always 0 where the kernel does not tell."""
    try:
        first_line = _STATISTICS.read_text().split("\n", 1)[0]
    except OSError:
        return 0.0
    ticks = [int(field) for field in first_line.split()[1:]]
    return sum(ticks[field] for field in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
