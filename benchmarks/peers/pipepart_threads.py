"""pipepart on virtual devices of one thread each, and the plans that give every contender its cut."""

import copy

from torch import Tensor

import pipepart
from benchmarks.contender import Course, Cut, InThisProcess
from benchmarks.models import Workload
from pipepart import Plan

SCHEDULES = ("gpipe", "1f1b")
DEVICES = 2


def make_plans(workload: Workload, micro_batches: int) -> dict[str, Plan]:
    """Profiles the model once and plans it under each schedule, for two devices of one thread."""
    profile = pipepart.profile(
        workload.model,
        workload.sample,
        loss_fn=workload.loss_fn,
        target=workload.target,
        micro_batches=micro_batches,
    )
    cluster = pipepart.Cluster.virtual(DEVICES, threads=1)
    return {
        schedule: pipepart.plan(profile, cluster, schedule=schedule, micro_batches=micro_batches)
        for schedule in SCHEDULES
    }


def cut_of(plans: dict[str, Plan]) -> Cut:
    """The cut that all plans share.

    Raises:
        ValueError: they cut the model in different places, so that a race would not be one of schedules.
    """
    cuts = {tuple(stage.layers for stage in plan.stages) for plan in plans.values()}
    if len(cuts) > 1:
        raise ValueError(f"the plans under {', '.join(plans)} cut the model in different places: {cuts}")
    return cuts.pop()


def name_of(plan: Plan) -> str:
    """What the contender that runs `plan` is called."""
    return f"pipepart {plan.schedule}"


class PipepartThreads(InThisProcess):
    """One plan, run by one worker thread for each device."""

    def __init__(self, course: Course, plan: Plan) -> None:
        self.name = name_of(plan)
        self._workload = course.workload
        model = copy.deepcopy(course.workload.model)
        self._pipe = pipepart.Pipeline(model, plan, loss_fn=course.workload.loss_fn)

    def step(self) -> None:
        self._pipe.zero_grad()
        self._pipe.step(self._workload.sample, target=self._workload.target)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._pipe.named_parameters() if p.grad is not None}

    def close(self) -> None:
        self._pipe.close()
