"""What each device has in its memory during each action of a step, by category."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

import schedules
from schedules import Kind, Timeline
from schedules.core.dependencies import dependencies

from ..costs.stage_memory import Floats
from .plan_record import PlanRecord
from .stage_plan import StagePlan, sizes_of


@dataclass(frozen=True)
class DeviceMemory:
    """What one device has in its memory over a step.

    Attributes:
        at: seconds from which on each row holds, ascending: before the device's first action, during each of them, and
            after the last one.
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
        timeline: of a step of the plan, simulated or measured, without overlapped pairs.
    """
    schedule, stages = timeline.schedule, plan.all_stages
    found = dependencies(schedule)
    starts, ends = (np.array([at for row in rows for at in row]) for rows in (timeline.starts, timeline.ends))
    sums, others = found.is_kind(Kind.REDUCE_GRAD), plan.summed_replicas - 1
    tables = schedules.memory_during(timeline)
    origin = min(starts.tolist(), default=0.0)
    memory = []
    for device, ((first, last), counts) in enumerate(zip(pairwise(found.offsets), tables, strict=True)):
        own = schedule.stages_of(device)
        counts = counts[: last - first]
        counts[:, :, -1] += _others_gradients(sums[first:last], own, others, schedule.model_stages)
        counts = np.concatenate([_between_steps(counts[:1]), counts, _between_steps(counts[-1:])])
        at = np.r_[origin, starts[first:last], ends[last - 1 : last]]
        memory.append(DeviceMemory(at, _by_category(counts, [stages[number] for number in own])))
    return tuple(memory)


def _between_steps(counts: np.ndarray) -> np.ndarray:
    """Return counts without what micro-batches in flight add: of weights without gradients alone."""
    rest = np.zeros_like(counts)
    rest[:, :, -1] = counts[:, :, -1]
    return rest


def _others_gradients(sums: np.ndarray, own: tuple[int, ...], others: int, model_stages: int) -> np.ndarray:
    """Count the gradients of other replicas, which are at the first one from its first sum on: [actions, stages].

    Args:
        sums: whether each action of the device is a sum of gradients.
        own: the stages of the device.
        others: the number of other replicas.
        model_stages: of one replica; the first replica has the first ones.
    """
    summed = np.logical_or.accumulate(sums)[:, None] & (np.array(own) < model_stages)
    return others * summed.astype(np.int64)


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
