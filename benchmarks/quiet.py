"""Tells how much of the processor went to programs that are none of ours."""

import os
from pathlib import Path

_STATISTICS = Path("/proc/stat")
# user, nice, system, irq, softirq, steal: what ran here, or what the host gave to others.
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)


def busy_seconds() -> float:
    """CPU seconds of the whole machine since its start, in steps of a clock tick; 0 where no one tells."""
    try:
        first_line = _STATISTICS.read_text().split("\n", 1)[0]
    except OSError:
        return 0.0
    ticks = [int(field) for field in first_line.split()[1:]]
    return sum(ticks[field] for field in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
