"""What every other engine asks of a plan: which plans none of them runs, and what all of them are told."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import schedules
from schedules import Kind

from ...units import counted, format_bytes
from ..plans.plan_record import PlanRecord

_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})


def faults_for_all(plan: PlanRecord) -> Iterator[str]:
    """Yield the reasons why no other engine runs a plan."""
    if plan.asynchronous:
        yield (
            f"schedule {plan.schedule!r} is asynchronous (it updates weights within a step): plan with schedule='1f1b'"
        )
    if plan.first_replica.build_schedule().replicas > 1:
        yield (
            f"schedule {plan.schedule!r} keeps two copies of the model on the same devices: plan with "
            "schedule='1f1b', or with 'zb-v' or 'dualpipe-v' for as short a bubble"
        )
    if offloading := [number for number, stage in enumerate(plan.stages) if stage.offload != "never"]:
        yield f"stage {_numbers(offloading)} offloads its stash to the host: plan with offload='never'"
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


def notes_for_all(plan: PlanRecord) -> Iterator[str]:
    """Yield what the user of any engine has to know."""
    ranks = plan.first_replica.workers
    yield "Pipeline ranks and their devices: " + ", ".join(
        f"{rank} is {device.name}" for rank, device in enumerate(ranks)
    )
    yield (
        "The engine weighs the losses of micro-batches in its own way, and draws other random numbers than pipepart, "
        "which weighs them as the loss of the whole mini-batch does"
    )
    if plan.replicas > 1:
        others = "; ".join(", ".join(names) for names in plan.replica_devices)
        yield (
            f"The plan has {plan.replicas} replicas: run this with a data-parallel degree of {plan.replicas}, each "
            f"with {micro_batches_of(plan)} of {plan.micro_batches} micro-batches. The others are on {others}"
        )


def order_of(plan: PlanRecord) -> schedules.Schedule:
    """Return the forwards and backwards of one replica; its devices are the ranks of the pipeline."""
    order = plan.first_replica.build_schedule()
    rows = tuple(tuple(action for action in row if action.kind in _COMPUTE) for row in order.actions)
    return replace(order, actions=rows)


def micro_batches_of(plan: PlanRecord) -> int:
    """Return the micro-batches of one replica."""
    return plan.micro_batches // plan.replicas


def mixed_recompute(plan: PlanRecord) -> Iterator[str]:
    """Yield a fault if an engine that recomputes all stages or none cannot recompute those of the plan."""
    modes = {stage.recompute for stage in plan.stages}
    if modes not in ({"never"}, {"always"}):
        some = [number for number, stage in enumerate(plan.stages) if stage.recompute != "never"]
        yield (
            f"stage {_numbers(some)} recomputes, and the engine recomputes all stages for all micro-batches, or none: "
            "plan with recompute='always' or recompute='never'"
        )


def recomputes(plan: PlanRecord) -> bool:
    """Return True if any stage recomputes."""
    return any(stage.recompute != "never" for stage in plan.stages)


def only_schedules(plan: PlanRecord, *names: str) -> Iterator[str]:
    """Yield a fault if the schedule of the plan is none of these."""
    if plan.schedule not in names:
        yield (
            f"it has no schedule {plan.schedule!r}: plan with "
            + " or ".join(f"schedule={name!r}" for name in names)
        )


def split_ties(plan: PlanRecord, but: Collection[frozenset[str]] = ()) -> Iterator[str]:
    """Yield a fault for each pair of layers in two stages that share a parameter or buffer, except given pairs."""
    if plan.profile is None:
        return
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    for info in plan.profile.layers:
        for owner in info.shares_with:
            if stage_of[owner] != stage_of[info.name] and frozenset({owner, info.name}) not in but:
                yield (
                    f"layers {owner!r} (stage {stage_of[owner]}) and {info.name!r} (stage {stage_of[info.name]}) share "
                    "tensors, whose gradients the engine would not add up: plan with allow_split_ties=False"
                )


def far_values(plan: PlanRecord, arguments: bool) -> str:
    """Return as text which values are used in a stage behind the next one; empty if none is.

    Args:
        plan: with a profile, or written by hand with the skips of its stages.
        arguments: also those that the model was given.
    """
    if plan.profile is None:
        found = [
            f"{format_bytes(skip.bytes)} of stage {number} in stage {skip.target}"
            for number, stage in enumerate(plan.stages)
            for skip in stage.skips
        ]
        return _shortened(found)
    names = [info.name for info in plan.profile.layers]
    stage_of = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    found = []
    for value in plan.profile.at(plan.micro_batches).values:
        maker, user = value.layers[0], value.layers[-1]
        if stage_of[user] - stage_of[maker] > 1 and (arguments or not value.is_argument):
            source = (
                "an argument"
                if value.is_argument
                else f"a value of {names[maker]!r} (stage {stage_of[maker]})"
            )
            found.append(f"{source} in {names[user]!r} (stage {stage_of[user]})")
    return _shortened(found)


def losses_out_of_order(plan: PlanRecord) -> Iterator[str]:
    """Yield a fault if torch's runtime would mix up losses: it counts the forwards of the last stage."""
    order = order_of(plan)
    last = order.stages - 1
    leaves = [leaf for action in order.actions[order.device_of[last]] for leaf in action.leaves]
    numbers = [leaf.micro_batch for leaf in leaves if leaf.kind is Kind.F and leaf.stage == last]
    if numbers != list(range(order.micro_batches)):
        yield (
            f"the last stage runs its forwards in the order {', '.join(map(str, numbers))}, and the engine takes its "
            "k-th loss for that of micro-batch k: plan with a named schedule"
        )


def whole_backwards(plan: PlanRecord) -> Iterator[str]:
    """Yield a note if the plan splits backwards, for an engine that does not."""
    if plan.split_critical:
        yield (
            f"The plan splits {counted(len(plan.split_critical), 'backward')} into their two parts. Here they stay "
            "whole: the same gradients, in a slightly longer step"
        )


def _shortened(texts: list[str]) -> str:
    texts = list(dict.fromkeys(texts))
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")


def _numbers(stages: list[int]) -> str:
    return ", ".join(map(str, stages))
