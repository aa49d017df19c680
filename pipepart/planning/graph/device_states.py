"""DeviceStates: which devices are still available along the pipeline."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Problem

States = NDArray[np.intp]

# With more states, only the cluster's own order of the devices is used. Ten different devices have 1024 states.
MOST_STATES = 1100


@dataclass(frozen=True)
class DeviceStates:
    """States numbered so that taking a device leads to a higher number; in state 0 all devices are available.

    Attributes:
        available: number of available devices of each type in each state; shape (states, types).
        transitions: for each type the states that can take a device of it, and the states that follow.
        complete: whether every order of the devices is a path of states.
    """

    available: NDArray[np.int64]
    transitions: tuple[tuple[States, States], ...]
    complete: bool

    def __len__(self) -> int:
        return len(self.available)

    def steps(self) -> list[list[tuple[int, int]]]:
        """For each state the types that it can take a device of, each with the state that follows."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(len(self))]
        for device_type, (before, after) in enumerate(self.transitions):
            for state, target in zip(before.tolist(), after.tolist(), strict=True):
                found[state].append((device_type, target))
        return found


def device_states(problem: Problem) -> DeviceStates:
    """Return the states of all orders of the devices, or of the cluster's own order if there are too many states.

    Devices may be left out at any point. There are (devices + 1) states for one type, and for several the product.
    """
    counts = [len(device_type.devices) for device_type in problem.types]
    if math.prod(count + 1 for count in counts) > MOST_STATES:
        return _given_order(problem)
    available = np.array(list(itertools.product(*(range(count, -1, -1) for count in counts))))
    strides = [math.prod(count + 1 for count in counts[index + 1 :]) for index in range(len(counts))]
    transitions = []
    for index, stride in enumerate(strides):
        before = np.nonzero(available[:, index])[0]
        transitions.append((before, before + stride))
    return DeviceStates(available, tuple(transitions), complete=True)


def _given_order(problem: Problem) -> DeviceStates:
    """States of the cluster's own order: state ``i`` has the devices from ``i`` on and may take any of them."""
    type_of = {
        device: index for index, device_type in enumerate(problem.types) for device in device_type.devices
    }
    count = len(type_of)
    available = np.zeros((count + 1, len(problem.types)), dtype=np.int64)
    for device in range(count - 1, -1, -1):
        available[device] = available[device + 1]
        available[device, type_of[device]] += 1
    transitions = []
    for index in range(len(problem.types)):
        pairs = [(i, j + 1) for i in range(count) for j in range(i, count) if type_of[j] == index]
        transitions.append((np.array([i for i, _ in pairs]), np.array([j for _, j in pairs])))
    return DeviceStates(available, tuple(transitions), complete=False)
