"""Reads and keeps the states of torch's global random generators, which all threads share.

A thread may set a state for a moment, draw, and put the state back, with the generator's lock held. So whoever copies a
state holds the lock as well: the copy must not be one that another thread has set for a moment.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GENERATOR_LOCKS: defaultdict[torch.device, threading.Lock] = defaultdict(
    threading.Lock
)  # by a generator's device
_CPU = torch.device("cpu")


def state_of(device: torch.device = _CPU) -> Tensor:
    """Return the state of the global generator of a device."""
    with GENERATOR_LOCKS[device]:
        if device.type == "cpu":
            return torch.default_generator.get_state()
        return torch.get_device_module(device).get_rng_state(device)


def set_state(state: Tensor, device: torch.device = _CPU) -> None:
    """Set the state of the global generator of a device."""
    with GENERATOR_LOCKS[device]:
        if device.type == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def draws_undone(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Put back the states of the generators of the CPU and of further devices after the block.

    The block does not hold the locks: what it runs may draw, and wait for threads that draw.
    """
    kept = [(state_of(device), device) for device in (_CPU, *devices)]
    try:
        yield
    finally:
        for state, device in kept:
            set_state(state, device)
