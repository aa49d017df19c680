"""Stages that are described by numbers on the command line: their costs, their schedule, and a plan on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import schedules
from schedules import Schedule, StageCosts

from ..capture import LayerInfo
from ..cluster import Cluster
from ..planning import Plan, plan
from ..profiling import Costs, LayerCost, Profile, SavedTensor, Timing
from ..units import counted, parse_bytes
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

    def on_cluster(
        self,
        cluster: Cluster,
        schedule: str,
        devices: int,
        micro_batches: int,
        chunks: int | None,
        replicas: int,
        message: str | None,
        gradients: str | None,
    ) -> Plan:
        """Return the plan of these stages on the devices of a cluster that run them fastest.

        Args:
            cluster: its speeds, links and memory count.
            schedule: its name, or "search".
            devices: of one replica.
            micro_batches: of all replicas.
            chunks: stages per device; None for those of the schedule.
            replicas: of all stages, whose gradients are summed.
            message: size of what a stage sends to the next one for a micro-batch; None for nothing.
            gradients: size of the gradients of a device's stages; None for nothing.

        Raises:
            UsageError: the cluster has too few devices, or there is another number of costs than stages.
            ValueError: the schedule does not exist for these numbers, or the cluster has too little memory.
        """
        wanted = max(devices, 1) * replicas
        if wanted > len(cluster):
            raise UsageError(
                f"{counted(replicas, 'replica')} need {counted(wanted, 'device')}, and the cluster has {len(cluster)}"
            )
        order = built(schedule, devices, -(-micro_batches // replicas), chunks)
        stages = order.model_stages
        sent = 0 if message is None else parse_bytes(message)
        summed = 0 if gradients is None else parse_bytes(gradients) * devices // stages
        names = [f"stage {number}" for number in range(stages)]
        timings = [[Timing(seconds=each) for each in seconds] for seconds in self._seconds(order)]
        profile = Profile(
            model="stages",
            batch=micro_batches,
            inputs=(),
            outputs=(),
            layers=tuple(
                LayerInfo(
                    name=name, kind="Stage", description="", parameter_bytes=summed, gradient_bytes=summed
                )
                for name in names
            ),
            costs=(
                Costs(
                    micro_batches=micro_batches,
                    samples=1,
                    layers=tuple(
                        LayerCost(
                            forward=forward,
                            backward_input=backward_input,
                            backward_weight=backward_weight,
                            output_bytes=sent,
                        )
                        for forward, backward_input, backward_weight in zip(*timings, strict=True)
                    ),
                    saved=tuple(
                        SavedTensor(bytes=int(size), layers=(number,))
                        for number, size in enumerate(self._stash_bytes(order))
                    ),
                ),
            ),
            optimizer="sgd",
            device="cpu",
            threads=None,
            torch_version="none",
        )
        return plan(
            profile,
            cluster,
            schedule=schedule,
            micro_batches=micro_batches,
            recompute="never",
            offload="never",
            stages=stages,
            chunks=None if schedule == "search" else stages // devices,
            replicas=replicas,
            cut_before=names[1:],
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
    """Build the schedule of described stages; for a search, one of the same stages."""
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
