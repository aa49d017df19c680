"""Memory of each device during each action of a step, in bytes per category."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import schedules
from schedules import Kind, Timeline

from ..costs.stage_memory import COLUMNS, DEFERRED, INPUT, MESSAGES, STASH, VERSION, WORKSPACE, Floats
from .plan import Plan
from .stage_plan import StagePlan, sizes_of


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device over a step.

    Attributes:
        at: [rows]: start of each row in seconds, ascending. A row is the time before the device's first action, during
            an action, or after the last action.
        bytes: [rows] for each category. The categories are parameters, gradients, optimizer, buffers, stashes, inputs
            (held for a recompute or while a stash is on the host), weight gradients (held by a split backward until W),
            messages (that wait), and workspace (of the running action).
    """

    at: Floats
    bytes: Mapping[str, Floats]

    @property
    def total(self) -> Floats:
        """[rows]: sum of all categories."""
        return np.sum(list(self.bytes.values()), axis=0)


def memory_over_time(plan: Plan, timeline: Timeline) -> tuple[DeviceMemory, ...]:
    """Return the memory of each device over a step, in the order of the schedule's rows.

    The peak of a device equals :meth:`~pipepart.planning.Plan.device_bytes` for the same timeline.

    Args:
        plan: with predicted stages.
        timeline: a simulated or measured step of the plan, without overlapped pairs.
    """
    schedule, stages, further_replicas = timeline.schedule, plan.all_stages, plan.summed_replicas - 1
    origin = min((start for row in timeline.starts for start in row), default=0.0)
    memory = []
    for device, counts in enumerate(schedules.memory_during(timeline)):
        row, numbers = schedule.actions[device], schedule.stages_of(device)
        counts = counts[: len(row)]
        # After its first reduction, the first replica holds the gradients of the other replicas.
        summed = np.logical_or.accumulate([action.kind is Kind.REDUCE_GRAD for action in row])
        counts[:, :, VERSION] += further_replicas * (
            summed[:, None] & (np.array(numbers) < schedule.model_stages)
        )
        padded = np.concatenate([counts[:1], counts, counts[-1:]])
        padded[[0, -1], :, :VERSION] = 0  # between steps no micro-batch is in flight
        at = np.r_[origin, timeline.starts[device], timeline.ends[device][-1:]]
        memory.append(DeviceMemory(at, _by_category(padded, [stages[number] for number in numbers])))
    return tuple(memory)


def _by_category(counts: np.ndarray, stages: list[StagePlan]) -> dict[str, Floats]:
    """Return [rows] bytes for each category, from the counts of :func:`schedules.memory_during`."""
    held = counts * sizes_of(stages).table[0, :, -COLUMNS:]
    parameters = sum(stage.parameter_bytes for stage in stages)
    optimizer = sum(stage.optimizer_bytes for stage in stages)
    buffers = sum(stage.buffer_bytes for stage in stages)
    gradients = sum(stage.static_bytes for stage in stages) - parameters - optimizer - buffers
    always = np.ones(len(counts))
    return {
        "parameters": parameters * always,
        "gradients": gradients + held[:, :, VERSION].sum(axis=1),
        "optimizer": optimizer * always,
        "buffers": buffers * always,
        "stashes": held[:, :, STASH].sum(axis=1),
        "inputs": held[:, :, INPUT].sum(axis=1),
        "weight gradients": held[:, :, DEFERRED].sum(axis=1),
        "messages": held[:, :, MESSAGES].sum(axis=(1, 2)),
        "workspace": held[:, :, WORKSPACE].sum(axis=(1, 2)),
    }
