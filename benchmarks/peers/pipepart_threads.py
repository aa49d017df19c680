"""pipepart on virtual devices of one thread each, and the plans that it runs."""

import copy

from torch import Tensor

import pipepart
from benchmarks.contender import InThisProcess
from benchmarks.models import Workload
from pipepart import Plan, Profile

SCHEDULES = ("gpipe", "1f1b")
DEVICES = 2
AUTO = "pipepart auto"


def profiled(workload: Workload, micro_batches: int) -> Profile:
    """Measures the model anew."""
    return pipepart.profile(
        workload.model,
        workload.sample,
        loss_fn=workload.loss_fn,
        target=workload.target,
        micro_batches=micro_batches,
    )


def make_plans(profile: Profile) -> dict[str, Plan]:
    """Plans for two devices of one thread, by the names of the contenders that run them.

    Those under a named schedule have the cut of the plan for 1F1B, which the peers run too. ``auto`` has its own.
    """
    cluster = pipepart.Cluster.virtual(DEVICES, threads=1)
    shared = pipepart.plan(profile, cluster, schedule="1f1b", stages=DEVICES)
    cut = [stage.layers[0] for stage in shared.stages[1:]]
    plans = {
        f"pipepart {schedule}": pipepart.plan(profile, cluster, schedule=schedule, cut_before=cut)
        for schedule in SCHEDULES
    }
    auto = pipepart.plan(profile, cluster)
    if auto.unused_devices:  # the tiny model gains nothing, but the overhead of two devices is what it is for
        auto = pipepart.plan(profile, cluster, stages=DEVICES)
    return {**plans, AUTO: auto}


def predicted_seconds(plan: Plan, profile: Profile) -> float:
    """The step that the plan has with the costs of another profile of the same layers."""
    return plan.model_copy(update={"profile": profile}).predict().predicted.step_seconds


class PipepartThreads(InThisProcess):
    """One plan, run by one worker thread for each device."""

    def __init__(self, name: str, workload: Workload, plan: Plan) -> None:
        self.name = name
        self._workload = workload
        model = copy.deepcopy(workload.model)
        self._pipe = pipepart.Pipeline(model, plan, loss_fn=workload.loss_fn)

    def step(self) -> None:
        self._pipe.zero_grad()
        self._pipe.step(self._workload.sample, target=self._workload.target)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._pipe.named_parameters() if p.grad is not None}

    def close(self) -> None:
        self._pipe.close()
