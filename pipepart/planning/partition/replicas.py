"""The copies of the model that a plan trains at once: where their stages run, and what they cost there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import schedules

from ..stage_plan import StagePlan

if TYPE_CHECKING:
    from ..plan_document import Plan


# Of gradients that are added up, or parameters that are set, on one core: 64 MiB take 13 ms of either.
_CPU_BYTES_A_SECOND = 5e9


def stage_devices(plan: Plan, schedule: schedules.Schedule) -> tuple[str, ...]:
    """The name of the device of each stage, as the schedule numbers them: stage after stage, copy after copy.

    Args:
        plan: says it of one copy for each that plain data parallelism adds.
        schedule: of the plan; a bidirectional one runs further copies on the same devices.
    """
    apart = schedule.stages // plan.replicas
    rows: dict[int, str] = {}
    for copy, names in enumerate(([stage.device for stage in plan.stages], *plan.replica_devices)):
        rows.update(zip(schedule.device_of[copy * apart :], names, strict=False))
    return tuple(rows[row] for row in schedule.device_of)


def all_stages(plan: Plan, schedule: schedules.Schedule) -> tuple[StagePlan, ...]:
    """The stages of all copies, as the schedule numbers them; those of the first are the plan's.

    A further copy holds parameters and gradients of its own, and leaves the optimizer to the first.
    """
    names, count = stage_devices(plan, schedule), len(plan.stages)
    found = list(plan.stages)
    for first in range(count, schedule.stages, count):
        own = names[first : first + count]
        found += map(partial(_moved, plan), plan.stages, own, _transfer_seconds(plan, own))
    return tuple(found)


def reduce_seconds(plan: Plan, stages: Sequence[StagePlan]) -> list[float]:
    """What each stage of all copies takes to bring the copies together.

    The first copy fetches the gradients of one after the other and adds them up; they fetch the changed parameters all
    at once. In the memory of a CPU nothing travels, but everything is read and written.
    """
    count = len(plan.stages)
    found = [0.0] * len(stages)
    for number, stage in enumerate(plan.stages):
        others = [other.device for other in stages[number + count :: count]]
        links = [plan.cluster.link_between(stage.device, other) for other in others]
        fetched = (link.seconds(stage.parameter_bytes) for link in links)
        found[number] = sum(link.seconds(stage.gradient_bytes) for link in links) + max(fetched, default=0.0)
        if plan.cluster.device(stage.device).torch_device == "cpu":
            found[number] += (
                len(others) * (stage.gradient_bytes + stage.parameter_bytes) / _CPU_BYTES_A_SECOND
            )
    return found


def _moved(plan: Plan, stage: StagePlan, name: str, transfer_seconds: float) -> StagePlan:
    """The stage as it is in a further copy, on another device."""
    slower = plan.cluster.device(stage.device).speed / plan.cluster.device(name).speed
    return stage.model_copy(
        update={
            "device": name,
            "forward_seconds": stage.forward_seconds * slower,
            "backward_input_seconds": stage.backward_input_seconds * slower,
            "backward_weight_seconds": stage.backward_weight_seconds * slower,
            "split_seconds": None if stage.split_seconds is None else stage.split_seconds * slower,
            "recompute_seconds": stage.recompute_seconds * slower,
            "transfer_seconds": transfer_seconds,
            "static_bytes": stage.parameter_bytes + stage.gradient_bytes,
            "optimizer_bytes": 0,
        }
    )


def _transfer_seconds(plan: Plan, names: Sequence[str]) -> list[float]:
    """To move the inputs and outputs of each stage and their gradients, where the stages are on these devices."""
    if plan.profile is None:
        return [stage.transfer_seconds for stage in plan.stages]
    borders = [0.0]
    trains = False
    for stage, (one, other) in zip(plan.stages, pairwise(names), strict=False):
        trains = trains or stage.gradient_bytes > 0
        once = 0.0 if one == other else plan.cluster.link_between(one, other).seconds(stage.output_bytes)
        borders.append(2 * once if trains else once)
    return [before + behind for before, behind in pairwise([*borders, 0.0])]
