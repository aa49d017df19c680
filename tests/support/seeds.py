"""Seeds for slow tests: a third of the cases is fixed, the others change from run to run by one printed seed.

``make slow ARGS="--seed 123"`` repeats the run whose header says 123 (tests/conftest.py reads the option).
"""

from __future__ import annotations

import random

_FIRST_FIXED, _FIRST_DRAWN = 1_000, 10_000  # apart, so that no case comes twice
_run = 0


def set_seed(seed: int) -> None:
    """Set the seed of this run of pytest."""
    global _run
    _run = seed


def seeds(count: int, name: str) -> list[int]:
    """``count`` seeds for the test called ``name``: a third never changes, the others depend on the run."""
    fixed = count // 3
    draw = random.Random(f"{_run} {name}")
    return [
        *range(_FIRST_FIXED, _FIRST_FIXED + fixed),
        *(draw.randrange(_FIRST_DRAWN, 10**9) for _ in range(count - fixed)),
    ]
