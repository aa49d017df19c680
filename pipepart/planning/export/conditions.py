"""Checks whether an engine can run a plan, and writes the notes for its users."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import schedules
from schedules import Kind

from ...units import counted, format_bytes
from ..plans.plan_record import PlanRecord
from ..plans.value_ways import value_ways
from .engine import Engine

_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})
_SHOWN = 3  # largest number of values listed in a message


def faults_of(plan: PlanRecord, engine: Engine) -> list[str]:
    """Return the reasons why an engine cannot run a plan: those for all engines, or else those for this engine."""
    return list(_faults_for_all(plan)) or [*_missing_features(plan, engine), *engine.faults(plan)]


def notes_of(plan: PlanRecord, engine: Engine) -> tuple[str, ...]:
    """Return the notes on a plan for users of an engine."""
    return (*_notes_for_all(plan), *engine.notes(plan), *_differences(plan, engine))


def order_of(plan: PlanRecord) -> schedules.Schedule:
    """Return the schedule of one replica with its compute actions only; device i is pipeline rank i."""
    order = plan.first_replica.build_schedule()
    rows = tuple(tuple(action for action in row if action.kind in _COMPUTE) for row in order.actions)
    return replace(order, actions=rows)


def micro_batches_of(plan: PlanRecord) -> int:
    """Return the number of micro-batches of one replica."""
    return plan.micro_batches // plan.replicas


def modules_of(plan: PlanRecord) -> dict[str, tuple[str, ...]]:
    """Return layer name -> modules that the layer calls.

    For an nn.Sequential or a plan written by hand, a layer is its only module.
    """
    called = {info.name: info.modules for info in plan.profile.layers} if plan.profile else {}
    return {name: called.get(name) or (name,) for name in names_of(plan)}


def names_of(plan: PlanRecord) -> list[str]:
    """Return the names of all layers, in the order of the model."""
    return [name for stage in plan.stages for name in stage.layers]


def recomputes(plan: PlanRecord) -> bool:
    """Return True if any stage recomputes."""
    return any(stage.recompute != "never" for stage in plan.stages)


def _faults_for_all(plan: PlanRecord) -> Iterator[str]:
    """Yield the reasons why no engine can run a plan."""
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


def _missing_features(plan: PlanRecord, engine: Engine) -> Iterator[str]:
    """Yield the features of the plan that the :class:`Engine` fields exclude."""
    if engine.schedules and plan.schedule not in engine.schedules:
        names = " or ".join(f"schedule={name!r}" for name in engine.schedules)
        yield f"it has no schedule {plan.schedule!r}: plan with {names}"
    modes = {stage.recompute for stage in plan.stages}
    if modes not in ({"never"}, {"always"} if engine.recomputes else {"never"}):
        numbers = [number for number, stage in enumerate(plan.stages) if stage.recompute != "never"]
        instead = (
            "recomputes all stages for all micro-batches, or none: plan with recompute='always' or recompute='never'"
            if engine.recomputes
            else "does not: plan with recompute='never', or call torch.utils.checkpoint in the model and profile again"
        )
        yield f"stage {_numbers(numbers)} recomputes, and the engine {instead}"
    if not engine.far_values and (far := _far_values(plan, arguments=False)):
        yield (
            f"its stages send to their neighbours only, and the plan uses {far}: plan with stages=2, or let the layers "
            "between take these values and return them"
        )
    yield from _split_ties(plan, engine)
    if not engine.schedules:
        yield from _losses_out_of_order(plan)


def _split_ties(plan: PlanRecord, engine: Engine) -> Iterator[str]:
    """Yield a fault for each pair of layers in different stages that share a parameter or buffer."""
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    for info in plan.profile.layers if plan.profile else ():
        for owner in info.shares_with:
            if stage_of[owner] != stage_of[info.name] and not engine.adds_up_ties(plan, owner, info.name):
                yield (
                    f"layers {owner!r} (stage {stage_of[owner]}) and {info.name!r} (stage {stage_of[info.name]}) share "
                    "tensors, whose gradients the engine would not add up: plan with allow_split_ties=False"
                )


def _losses_out_of_order(plan: PlanRecord) -> Iterator[str]:
    """Yield a fault if the last stage runs forwards out of order: torch's runtime would mix up the losses."""
    order = order_of(plan)
    last = order.stages - 1
    leaves = [leaf for action in order.actions[order.device_of[last]] for leaf in action.leaves]
    numbers = [leaf.micro_batch for leaf in leaves if leaf.kind is Kind.F and leaf.stage == last]
    if numbers != list(range(order.micro_batches)):
        yield (
            f"the last stage runs its forwards in the order {', '.join(map(str, numbers))}, and the engine takes its "
            "k-th loss for that of micro-batch k: plan with a named schedule"
        )


def _notes_for_all(plan: PlanRecord) -> Iterator[str]:
    """Yield the notes for users of any engine."""
    ranks = enumerate(plan.first_replica.workers)
    yield "Pipeline ranks and their devices: " + ", ".join(
        f"{rank} is {device.name}" for rank, device in ranks
    )
    yield (
        "The engine weighs the losses of micro-batches in its own way, and draws other random numbers than pipepart, "
        "which weighs them as the loss of the whole mini-batch does"
    )
    if plan.replicas > 1:
        devices = "; ".join(", ".join(names) for names in plan.replica_devices)
        yield (
            f"The plan has {plan.replicas} replicas: run this with a data-parallel degree of {plan.replicas}, each "
            f"with {micro_batches_of(plan)} of {plan.micro_batches} micro-batches. The others are on {devices}"
        )


def _differences(plan: PlanRecord, engine: Engine) -> Iterator[str]:
    """Yield the notes on differences from the plan that follow from the :class:`Engine` fields."""
    if engine.far_values and (far := _far_values(plan, arguments=True)):
        yield f"{engine.far_values}: {far}"
    if engine.schedules and plan.split_critical:
        yield (
            f"The plan splits {counted(len(plan.split_critical), 'backward')} into their two parts. Here they stay "
            "whole: the same gradients, in a slightly longer step"
        )


def _far_values(plan: PlanRecord, arguments: bool) -> str:
    """Return a text that lists the values used beyond the next stage; empty if there are none.

    Args:
        plan: with a profile, or written by hand with the skips of its stages.
        arguments: also list arguments of the model.
    """
    far = [
        f"a value of {way.maker!r} (stage {way.stages[0]}) in {user!r} (stage {stage})"
        if way.maker
        else f"an argument in {user!r} (stage {stage})"
        for way in value_ways(plan)
        for user, stage in way.users[-1:]
        if stage - way.stages[0] > 1 and (arguments or way.maker)
    ]
    if plan.profile is None:
        far = [
            f"{format_bytes(skip.bytes)} of stage {number} in stage {skip.target}"
            for number, stage in enumerate(plan.stages)
            for skip in stage.skips
        ]
    texts = list(dict.fromkeys(far))
    return "; ".join(texts[:_SHOWN]) + (f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")


def _numbers(stages: list[int]) -> str:
    return ", ".join(map(str, stages))
