"""Seeds for slow tests: a third of the cases is fixed, the others change from run to run by one seed that is printed.

`PIPEPART_TEST_SEED=123 make slow` repeats the run whose header says 123.
"""

from __future__ import annotations

import os
import random
import time

# In the environment, so that the workers of pytest-xdist share it.
SEED = int(os.environ.setdefault("PIPEPART_TEST_SEED", str(int(time.time()))))


def seeds(count: int, name: str) -> list[int]:
    """So many seeds for the test called ``name``: a third is the same in every run, the others depend on ``SEED``.

    Prints the seed of the run, which pytest shows for a test that fails.
    """
    print(f"PIPEPART_TEST_SEED={SEED}")  # noqa: T201
    fixed = count // 3
    draw = random.Random(f"{SEED} {name}")
    return [*range(1000, 1000 + fixed), *(draw.randrange(10_000, 10**9) for _ in range(count - fixed))]
