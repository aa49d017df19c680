"""Seeds for slow tests: a third of the cases is fixed, the others change from run to run by one printed seed.

``make slow ARGS="--seed 123"`` repeats the run whose header says 123 (tests/conftest.py reads the option).
"""

from __future__ import annotations

import random

_run = 0


def set_seed(seed: int) -> None:
    global _run
    _run = seed


def seeds(count: int, name: str) -> list[int]:
    """``count`` seeds for the test called ``name``: a third never changes, the others depend on the run."""
    fixed = count // 3
    always, now = random.Random(name), random.Random(f"{_run} {name}")
    return [always.randrange(10**9) for _ in range(fixed)] + [
        now.randrange(10**9) for _ in range(count - fixed)
    ]
