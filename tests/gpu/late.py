"""Layers that delay their GPU, so that a missing wait between streams shows in the numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.pipeline.conformance.runners import SCHEDULES
from tests.support.in_backward import with_gradient
from tests.support.on_devices import cut_on

# Schedules, and their numbers of stages a device.
CHUNKS = {name: chunks for name, chunks in SCHEDULES if chunks < 3 and name not in ("sequential", "chimera")}

CYCLES = 2_000_000  # about a millisecond


class Late(nn.Module):
    """Passes on what it gets, late in either direction, by so many cycles of the GPU; on the CPU at once."""

    def __init__(self, cycles: int = CYCLES) -> None:
        super().__init__()
        self.cycles = cycles

    def forward(self, x: Tensor) -> Tensor:
        return with_gradient(x, self._late, self._late) if x.is_cuda else x * 1

    def _late(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(self.cycles)
        return x.clone()


def late_chain(stages: int, width: int = 64) -> nn.Sequential:
    """Three layers for each stage, in float64, so that sums in another order differ in the last bits alone."""
    layers: list[nn.Module] = []
    for stage in range(stages):
        layers += [Late(), nn.Linear(width, width), nn.BatchNorm1d(width) if stage % 3 == 1 else nn.Tanh()]
    return nn.Sequential(*layers).double()


def borders(stages: int) -> list[int]:
    """Where the stages of :func:`late_chain` begin, but for the first."""
    return [3 * stage for stage in range(1, stages)]


def cut_late_chain(model: nn.Sequential, devices: Sequence[str], schedule: str, **options: Any) -> Pipeline:
    """Return a pipeline of a :func:`late_chain` with the stages that a schedule has on these devices."""
    chunks = CHUNKS[schedule]
    return cut_on(
        devices,
        model,
        borders(len(devices) * chunks),
        nn.MSELoss(),
        micro_batches=8,
        schedule=schedule,
        chunks=chunks,
        **options,
    )
