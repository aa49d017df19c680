"""What each device has in its memory during each action of a step, by category."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

import schedules
from schedules import Kind, Timeline
from schedules.core.dependencies import Dependencies, dependencies

from ..costs.stage_memory import Floats
from .plan_record import PlanRecord
from .stage_plan import StagePlan, sizes_of


@dataclass(frozen=True)
class DeviceMemory:
    """What one device has in its memory over a step.

    Attributes:
        at: seconds from which on each row holds, ascending. The first row is what is there before the step; then there
            is one for each action, two for an overlapped pair.
        bytes: of each category, one number a row. The categories are parameters, gradients, optimizer, buffers,
            stashes, inputs (kept for a recompute or while a stash is on the host), weight gradients (what a split
            backward keeps until its second part), messages (that wait), and workspace (of the action that runs).
    """

    at: Floats
    bytes: Mapping[str, Floats]

    @property
    def total(self) -> Floats:
        """All categories together, one number a row."""
        return np.sum(list(self.bytes.values()), axis=0)


def memory_over_time(plan: PlanRecord, timeline: Timeline) -> tuple[DeviceMemory, ...]:
    """Return the memory of the devices over a step, in the order of the schedule's rows.

    The peak of a device is that of :meth:`~pipepart.planning.Plan.device_bytes` for the same timeline.

    Args:
        plan: whose stages have their figures.
        timeline: of a step of the plan, simulated or measured.
    """
    schedule, stages = timeline.schedule, plan.all_stages
    found = dependencies(schedule)
    starts, ends = (np.array([at for row in rows for at in row]) for rows in (timeline.starts, timeline.ends))
    spans = pairwise(np.searchsorted(found.owner, found.offsets).tolist())
    tables = schedules.memory_during(timeline)
    origin = min(starts.tolist(), default=0.0)
    memory = []
    for device, ((first, last), counts) in enumerate(zip(spans, tables, strict=True)):
        own = schedule.stages_of(device)
        _add_replicas(counts, own, plan.summed_replicas, schedule.model_stages, found, first, last)
        counts = np.concatenate([_before(counts), counts[: last - first]])
        at = np.append(origin, _begins(found, starts, ends, first, last))
        memory.append(DeviceMemory(at, _by_category(counts, [stages[number] for number in own])))
    return tuple(memory)


def _before(counts: np.ndarray) -> np.ndarray:
    """Return the counts before the first action: of weights without gradients alone."""
    first = counts[:1].copy()
    first[:, :, :-1] = 0
    return first


def _begins(found: Dependencies, starts: Floats, ends: Floats, first: int, last: int) -> Floats:
    """Return when each part of a device's actions begins; the second one of a pair in the middle of the pair."""
    owner = found.owner[first:last]
    second = np.diff(owner, prepend=-1) == 0
    return np.where(second, (starts[owner] + ends[owner]) / 2, starts[owner])


def _add_replicas(
    counts: np.ndarray,
    own: tuple[int, ...],
    replicas: int,
    model_stages: int,
    found: Dependencies,
    first: int,
    last: int,
) -> None:
    """Count the gradients of the other replicas, which are at the first one from its first sum of gradients on."""
    sums = np.flatnonzero(found.is_kind(Kind.REDUCE_GRAD)[first:last])
    if replicas > 1 and sums.size:
        counts[sums[0] :, [stage < model_stages for stage in own], -1] += replicas - 1


def _by_category(counts: np.ndarray, stages: list[StagePlan]) -> dict[str, Floats]:
    """Return the bytes of each category for the counts of :func:`schedules.memory_during`: [rows] each."""
    sizes = sizes_of(stages).table[0, :, 2:]
    held = counts * sizes
    fixed = {
        "parameters": sum(stage.parameter_bytes for stage in stages),
        "optimizer": sum(stage.optimizer_bytes for stage in stages),
        "buffers": sum(stage.buffer_bytes for stage in stages),
    }
    static = sum(stage.static_bytes for stage in stages)
    gradients = static - sum(fixed.values()) + held[:, :, 10].sum(axis=1)
    return {
        "parameters": np.full(len(counts), float(fixed["parameters"])),
        "gradients": gradients.astype(np.float64),
        "optimizer": np.full(len(counts), float(fixed["optimizer"])),
        "buffers": np.full(len(counts), float(fixed["buffers"])),
        "stashes": held[:, :, 0].sum(axis=1),
        "inputs": held[:, :, 1].sum(axis=1),
        "weight gradients": held[:, :, 2].sum(axis=1),
        "messages": held[:, :, 3:5].sum(axis=(1, 2)),
        "workspace": held[:, :, 5:10].sum(axis=(1, 2)),
    }
