"""Builds costs and a schedule for stages described by numbers on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import schedules
from schedules import Schedule, StageCosts

from ..units import parse_bytes
from .errors import UsageError


@dataclass(frozen=True)
class DescribedStages:
    """Options with the costs of stages, each one number for the stages of a device together or one per stage.

    So one number describes the same model under schedules with one and with several stages per device.

    Attributes:
        forward, backward_input, backward_weight: seconds.
        stash: sizes as text, with commas between them; None if not given.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    stash: str | None

    def costs(self, order: Schedule, latency: float) -> StageCosts:
        """Return the costs of the stages of a schedule. Without stash sizes a micro-batch on a device counts as 1."""
        forward, backward_input, backward_weight = self._seconds(order)
        return StageCosts(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            latency=latency,
            stash_bytes=self._stash_bytes(order) or _per_stage("--stash", [1.0], order),
        )

    def _seconds(self, order: Schedule) -> tuple[list[float], list[float], list[float]]:
        return (
            _per_stage("--forward", self.forward, order),
            _per_stage("--backward-input", self.backward_input, order),
            _per_stage("--backward-weight", self.backward_weight, order),
        )

    def _stash_bytes(self, order: Schedule) -> list[float]:
        if self.stash is None:
            return []
        return _per_stage("--stash", [parse_bytes(size) for size in self.stash.split(",")], order)


def built(name: str, devices: int, micro_batches: int, chunks: int | None) -> Schedule:
    """Build the schedule of described stages; for a search, a named schedule with the same stages."""
    if name == "search":
        return schedules.build("looped-bfs", devices, micro_batches, chunks or 1)
    return schedules.build(name, devices, micro_batches, chunks)


def _per_stage(option: str, numbers: Sequence[float], order: Schedule) -> list[float]:
    """Return one number per stage; a single one is that of a device, shared by its stages."""
    stages, devices = order.model_stages, order.devices
    if len(numbers) == 1:
        return [numbers[0] * devices / stages] * stages
    if len(numbers) != stages:
        raise UsageError(f"{option} has {len(numbers)} numbers for {stages} stages: give 1 or {stages}")
    return [float(number) for number in numbers]
