"""Which devices are still free along the pipeline, as states of a walk."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Problem

States = NDArray[np.intp]

# Beyond this many states (ten devices, no two alike, have 1024), the order of the devices is given, not searched.
MOST_STATES = 1100


@dataclass(frozen=True)
class Walk:
    """States numbered so that taking a device leads to a higher number; state 0 has all devices free.

    Attributes:
        free: for each state the number of free devices of each type, shape (states, types).
        moves: for each type the states that can take a device of it, and the states that follow.
        complete: whether every order of the devices is a path.
    """

    free: NDArray[np.int64]
    moves: tuple[tuple[States, States], ...]
    complete: bool

    def __len__(self) -> int:
        return len(self.free)


def walk(problem: Problem) -> Walk:
    """All orders of the devices, by how many of each type are free; for too many types, one order.

    Devices may be left out at any point. Few types have few states: (devices + 1) of one type, and the product over
    the types of these.
    """
    counts = [len(kind.devices) for kind in problem.types]
    if math.prod(count + 1 for count in counts) > MOST_STATES:
        return _one_order(problem)
    free = np.array(list(itertools.product(*(range(count, -1, -1) for count in counts))))
    strides = [math.prod(count + 1 for count in counts[index + 1 :]) for index in range(len(counts))]
    moves = []
    for index, stride in enumerate(strides):
        before = np.nonzero(free[:, index])[0]
        moves.append((before, before + stride))
    return Walk(free, tuple(moves), complete=True)


def _one_order(problem: Problem) -> Walk:
    """The devices in the cluster's order: state ``i`` has the devices from ``i`` on, and may take any of them."""
    type_of = {device: index for index, kind in enumerate(problem.types) for device in kind.devices}
    count = len(type_of)
    free = np.zeros((count + 1, len(problem.types)), dtype=np.int64)
    for device in range(count - 1, -1, -1):
        free[device] = free[device + 1]
        free[device, type_of[device]] += 1
    moves = []
    for index in range(len(problem.types)):
        pairs = [(i, j + 1) for i in range(count) for j in range(i, count) if type_of[j] == index]
        moves.append((np.array([i for i, _ in pairs]), np.array([j for _, j in pairs])))
    return Walk(free, tuple(moves), complete=False)
