"""Reads and keeps the states of torch's global random generators, which all threads share.

A thread may set a state for a moment, draw, and put the state back, with the generator's lock held. So whoever copies a
state holds the lock as well: the copy must not be one that another thread has set for a moment.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GENERATOR_LOCKS: defaultdict[torch.device, threading.Lock] = defaultdict(
    threading.Lock
)  # by a generator's device


def state_of(generator: torch.Generator) -> Tensor:
    """Return the state of a global generator."""
    with GENERATOR_LOCKS[generator.device]:
        return generator.get_state()


@contextmanager
def cpu_draws_restored() -> Iterator[None]:
    """Put back the state of the CPU's generator after the block.

    The block does not hold the lock: what it runs may draw, and wait for threads that draw.
    """
    lock = GENERATOR_LOCKS[torch.default_generator.device]
    with lock:
        kept = torch.random.fork_rng(devices=[])
        kept.__enter__()
    try:
        yield
    finally:
        with lock:
            kept.__exit__(None, None, None)
