"""Engine: the plans that another engine can run, why it cannot run others, and how a plan is written for it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import schedules
from schedules import Kind

from ...units import counted
from ..plans.plan import Plan
from ..plans.value_ways import value_ways

_WIDTH = 100
_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})


@dataclass(frozen=True)
class Engine:
    """The plans that an engine can run, and functions that write a plan for it.

    Attributes:
        files: returns file name -> text for a plan without faults.
        faults: returns reasons why the engine cannot run a plan, beyond those that follow from the fields below.
        recomputes: True if the engine can recompute all stages.
        takes_far_values: True if users can let a stage compute the values that it gets from beyond the stage before.
    """

    files: Callable[[Plan], Mapping[str, str]]
    faults: Callable[[Plan], Iterable[str]] = lambda plan: ()
    recomputes: bool = True
    takes_far_values: bool = True

    def faults_of(self, plan: Plan) -> list[str]:
        """Return the reasons why the engine cannot run a plan: those for all engines, or else those for this one."""
        return list(_faults_for_all(plan)) or [*self._missing_features(plan), *self.faults(plan)]

    def _missing_features(self, plan: Plan) -> Iterator[str]:
        """Yield the features of the plan that the fields exclude."""
        if recomputing := _stages(plan, [stage.recompute != "never" for stage in plan.stages]):
            if not self.recomputes:
                yield (
                    f"{recomputing} recomputes, and the engine does not: plan with recompute='never', or call "
                    "torch.utils.checkpoint in the model and profile again"
                )
            elif any(stage.recompute != "always" for stage in plan.stages):
                yield (
                    f"{recomputing} recomputes, and the engine recomputes all stages for all micro-batches, or none: "
                    "plan with recompute='always' or recompute='never'"
                )
        if not self.takes_far_values and (far := _far_value(plan, arguments=False)):
            yield (
                f"its stages send to their neighbours only, and the plan uses {far}: plan with stages=2, or let the "
                "layers between take this value and return it"
            )
        if (numbers := _last_forwards(plan)) != sorted(numbers):
            yield (
                f"the last stage runs its forwards in the order {', '.join(map(str, numbers))}, and the engine takes "
                "its k-th loss for that of micro-batch k: plan with a named schedule"
            )
        stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
        for info in plan.profile.layers if plan.profile else ():
            for owner in info.shares_with:
                here, there = stage_of[owner], stage_of[info.name]
                if here != there:
                    yield (
                        f"layers {owner!r} (stage {here}) and {info.name!r} (stage {there}) share tensors, whose "
                        "gradients the engine would not add up: plan with allow_split_ties=False"
                    )


def order_of(plan: Plan) -> schedules.Schedule:
    """Return the schedule of one replica with its compute actions only; device i is pipeline rank i."""
    order = plan.first_replica.build_schedule()
    rows = tuple(tuple(action for action in row if action.kind in _COMPUTE) for row in order.actions)
    return replace(order, actions=rows)


def micro_batches_of(plan: Plan) -> int:
    """Return the number of micro-batches of one replica."""
    return plan.micro_batches // plan.replicas


def modules_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return layer name -> modules that the layer calls, in the order of the model.

    For an nn.Sequential or a plan written by hand, a layer is its only module.
    """
    called = {info.name: info.modules for info in plan.profile.layers} if plan.profile else {}
    return {name: called.get(name) or (name,) for stage in plan.stages for name in stage.layers}


def head_of(plan: Plan, title: str) -> str:
    """Return comment lines (``#``) for the head of a file: a title, and what its user has to know of the plan."""
    ranks = ", ".join(f"{rank} is {device.name}" for rank, device in enumerate(plan.first_replica.workers))
    notes = [f"Pipeline ranks: {ranks}", f"Micro-batches of a step: {micro_batches_of(plan)} a replica"]
    if plan.replicas > 1:
        others = "; ".join(", ".join(names) for names in plan.replica_devices)
        notes.append(
            f"Run this with a data-parallel degree of {plan.replicas}; the other replicas are on {others}"
        )
    if any(stage.recompute != "never" for stage in plan.stages):
        notes.append("All stages recompute their forwards")
    if far := _far_value(plan, arguments=True):
        notes.append(
            f"Stages get values of the stage before only, and have to compute others themselves: {far}"
        )
    lines = textwrap.wrap(title, _WIDTH - 2)
    for note in notes:
        lines += textwrap.wrap(note, _WIDTH - 2, initial_indent="- ", subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)


def python_list(name: str, rows: Iterable[object]) -> str:
    """Return Python source that assigns a list to a name, with one element per line."""
    return f"{name} = [\n" + "".join(f"    {row!r},\n" for row in rows) + "]\n"


def _faults_for_all(plan: Plan) -> Iterator[str]:
    """Yield the reasons why no engine can run a plan."""
    order = plan.first_replica.build_schedule()
    if order.versions or order.replicas > 1:
        why = "is asynchronous" if order.versions else "keeps two copies of the model on the same devices"
        yield f"schedule {plan.schedule!r} {why}: plan with schedule='1f1b'"
    if offloading := _stages(plan, [stage.offload != "never" for stage in plan.stages]):
        yield f"{offloading} offloads its stash to the host: plan with offload='never'"
    if plan.constraints.reduction == "batch":
        yield (
            "the loss is computed on the output of the whole mini-batch, and other engines compute it for each "
            "micro-batch: plan without reduction='batch'"
        )
    if plan.micro_batches % plan.replicas:
        yield (
            f"{counted(plan.micro_batches, 'micro-batch', 'es')} are shared unevenly by {plan.replicas} replicas: plan "
            f"with micro_batches={-(-plan.micro_batches // plan.replicas) * plan.replicas}"
        )


def _far_value(plan: Plan, arguments: bool) -> str:
    """Return a text on a value that is used beyond the next stage; empty if there is none.

    Args:
        plan: with a profile; for others nothing is known.
        arguments: also look at arguments of the model.
    """
    for way in value_ways(plan):
        user, stage = way.users[-1]
        if stage - way.stages[0] > 1 and (arguments or way.maker):
            value = f"a value of {way.maker!r} (stage {way.stages[0]})" if way.maker else "an argument"
            return f"{value} in {user!r} (stage {stage})"
    return ""


def _last_forwards(plan: Plan) -> list[int]:
    """Return the micro-batches of the last stage's forwards, in the order in which they run."""
    order, last = order_of(plan), len(plan.stages) - 1
    leaves = [leaf for action in order.actions[order.device_of[last]] for leaf in action.leaves]
    return [leaf.micro_batch or 0 for leaf in leaves if leaf.kind is Kind.F and leaf.stage == last]


def _stages(plan: Plan, chosen: Sequence[bool]) -> str:
    """Return the chosen stages as in "stage 0, 2"; empty if there are none."""
    numbers = [str(number) for number in range(len(plan.stages)) if chosen[number]]
    return f"stage {', '.join(numbers)}" if numbers else ""
