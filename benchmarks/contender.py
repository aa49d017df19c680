"""Interface of a benchmarked framework: run a step, return the gradients, and report the CPU time used."""

import time
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from benchmarks.models import Workload

Cut = tuple[tuple[str, ...], ...]
"""The names of the layers of each stage, in order."""


@dataclass(frozen=True)
class Course:
    """What every contender runs: the same model and mini-batch, the same cut, the same micro-batches."""

    workload: Workload
    cut: Cut
    micro_batches: int


class Contender(Protocol):
    """One framework under one schedule, ready to step on a `Course`.

    A step clears the gradients, then runs forward and backward of the whole mini-batch. No optimizer runs: it
    would cost all of them the same.
    """

    name: str

    def step(self) -> None: ...

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step, under the names that the unwrapped model gives its parameters."""
        ...

    def cpu_seconds(self) -> float:
        """The CPU time that the processes of this contender have used so far."""
        ...

    def close(self) -> None: ...


class InThisProcess:
    """The two answers that are the same for every contender without processes of its own."""

    def cpu_seconds(self) -> float:
        return time.process_time()

    def close(self) -> None:
        """Nothing outlives the object."""
