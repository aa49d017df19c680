"""``refine`` and ``replan``: scale a profile to measured steps of a plan, and plan again with it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from schedules import Kind, Schedule, Timeline, split_overlaps

from ..cluster import Cluster
from ..input_error import InputError
from ..profiling import Profile
from .costs.layer_ranges import ChainCosts
from .planner import plan as make_plan
from .plans.plan import Plan
from .plans.searched_order import SEARCH

Traces = Timeline | Sequence[Timeline]
_FORWARDS = frozenset({Kind.F, Kind.RECOMPUTE})
_BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W})


def refine(profile: Profile, plan: Plan, trace: Traces) -> Profile:
    """Return the profile with layer costs scaled to the measured seconds of a plan's stages.

    For each stage, one factor scales the forwards of its layers and another factor the backwards. Their sums then equal
    the measured medians over micro-batches and steps. The same factors scale the costs at other micro-batch sizes.
    Measured seconds are corrected for the speeds of the devices. Costs of 0 stay 0.

    Args:
        profile: of the plan's layers, with costs for its number of micro-batches.
        plan: the plan that was run.
        trace: a measured step of the plan, or several: ``Pipeline(..., trace=True).last_trace``.

    Raises:
        ValueError: there is no trace, or a trace is empty or has another schedule; or the profile has other layers, or
            no costs for the plan's number of micro-batches.
    """
    known = [info.name for info in profile.layers]
    planned = [name for stage in plan.stages for name in stage.layers]
    if known != planned:
        only = [name for name in (*known, *planned) if (name in known) != (name in planned)]
        where = f"{only[0]!r} is only in one of them" if only else "their order is another"
        raise InputError(f"the layers of the profile are not those of the plan: {where}")
    if plan.profile is not None and plan.profile.fingerprint != profile.fingerprint:
        raise InputError(
            "the profile is of another model than the plan: their layers differ though not in name"
        )
    measured = _stage_seconds(plan, profile, _checked_traces(plan, trace))
    predicted, _ = plan.model_copy(update={"profile": profile}).with_overhead()
    costs = ChainCosts(predicted, predicted.at(plan.micro_batches))
    # If a stage splits most of its backwards, its measured seconds include split_seconds.
    rows = plan.build_schedule().actions
    weights = Counter(action.stage for row in rows for action in row if action.kind is Kind.W)
    factors: list[tuple[float, float]] = []
    for number, (stage, device) in enumerate(zip(plan.stages, plan.devices, strict=True)):
        layers = slice(len(factors), len(factors) + len(stage.layers))
        forward = float(costs.forward[layers].sum())
        backward = float(costs.backward_input[layers].sum() + costs.backward_weight[layers].sum())
        if 2 * plan.replicas * weights[number] > plan.micro_batches and costs.split is not None:
            backward += float(costs.split[layers].sum())
        forward_seconds, backward_seconds = measured[number]
        factor = (
            forward_seconds * device.speed / forward if forward else 1.0,
            backward_seconds * device.speed / backward if backward else 1.0,
        )
        factors += [factor] * len(stage.layers)
    scaled = tuple(
        entry.model_copy(
            update={
                "layers": tuple(cost.scaled(*each) for cost, each in zip(entry.layers, factors, strict=True)),
                "loss": entry.loss.scaled(*factors[-1]),
            }
        )
        for entry in profile.costs
    )
    update: dict[str, Any] = {"costs": scaled}
    if profile.roofline is not None:  # the times were estimates
        notes = tuple(note for note in profile.notes if note != profile.roofline.note)
        update |= {"roofline": None, "notes": notes}
    return profile.model_copy(update=update)


def replan(
    plan: Plan,
    trace: Traces,
    profile: Profile | None = None,
    *,
    cluster: Cluster | None = None,
    **options: Any,
) -> Plan:
    """Refine a profile with measured steps of a plan, and return the plan for the refined profile.

    Args:
        plan: the plan that was run.
        trace: a measured step of the plan, or several: ``Pipeline(..., trace=True).last_trace``.
        profile: to refine; None for the profile in the plan, which has costs only for its number of micro-batches.
        cluster: the devices; None for the cluster of the plan.
        options: keywords of :func:`plan` to change. All other keywords are those of the first request
            (``plan.constraints``); ``schedule="auto"`` chooses again. ``chunks`` is reset if ``schedule`` changes. A
            plan without a profile, written by hand, keeps its schedule, chunks, replicas and micro-batches.

    Raises:
        ValueError: as :func:`refine` and :func:`plan` do, or ``profile`` is None and the plan has no profile.
        InfeasiblePlanError: as :func:`plan` does.
    """
    profile, keywords = profile or plan.profile, vars(plan.constraints).copy()
    if profile is None:
        raise InputError(
            "this plan holds no profile: give the one to refine, as in replan(plan, trace, profile=...)"
        )
    if plan.profile is None:
        keywords |= {
            "schedule": plan.schedule,
            "micro_batches": plan.micro_batches,
            "replicas": plan.replicas,
        }
        keywords["chunks"] = plan.chunks if plan.chunks > 1 and plan.schedule != SEARCH else None
        keywords["compress"] = plan.cluster.compressed or None
    refined = refine(profile, plan, trace)
    if options.get("schedule", keywords["schedule"]) != keywords["schedule"]:
        keywords["chunks"] = None  # use the default of the new schedule
    return make_plan(refined, cluster or plan.cluster, **{**keywords, **options})


def _checked_traces(plan: Plan, trace: Traces) -> list[Timeline]:
    """Return the trace as a list of measured steps, after checking that they are steps of the plan."""
    traces = [trace] if isinstance(trace, Timeline) else list(trace or ())
    if not traces:
        raise InputError("there is no trace: make the Pipeline with trace=True and run a step first")
    for number, step in enumerate(traces):
        which = "the trace" if len(traces) == 1 else f"trace {number}"
        if not isinstance(step, Timeline):
            raise InputError(f"{which} is no Timeline but {step!r:.80}")
        times = [time for rows in (step.starts, step.ends) for row in rows for time in row]
        if not all(map(math.isfinite, times)) or not (times and step.makespan > 0):
            raise InputError(f"{which} is empty, or has times that are no numbers")
        if difference := step_difference(step.schedule, plan):
            raise InputError(f"{which} is not a step of this plan: {difference}")
    return traces


def step_difference(traced: Schedule, plan: Plan) -> str:
    """Return a message on how the schedule of a measured step differs from the plan's; empty if it does not."""
    planned = split_overlaps(plan.build_schedule())
    names = {"name": "schedule", "devices": "devices", "stages": "stages", "micro_batches": "micro-batches"}
    for field, name in names.items():
        if getattr(traced, field) != getattr(planned, field):
            return f"its {name}: {getattr(traced, field)!r}, the plan's: {getattr(planned, field)!r}"
    for device, rows in enumerate(zip(traced.actions, planned.actions, strict=True)):
        for place, (ran, expected) in enumerate(zip_longest(*rows)):
            if ran != expected:
                return (
                    f"action {place} of device {device} is {ran or 'none'}, the plan's {expected or 'none'} "
                    f"(schedule {planned.name!r})"
                )
    return ""


def _stage_seconds(plan: Plan, profile: Profile, traces: Sequence[Timeline]) -> list[tuple[float, float]]:
    """Return [stages]: measured (forward, backward) seconds of one micro-batch on the devices of the first replica.

    Each value is the median over micro-batches, steps and replicas, without the overhead of an action. Seconds of other
    replicas are scaled to the device speeds of the first replica; seconds of unequal micro-batches are scaled to the
    mean size. A recomputed forward counts as a forward. I and W are added to one backward.
    """
    stages = len(plan.stages)
    devices = [plan.cluster.device(stage.device) for stage in plan.all_stages]
    scale = profile.at(plan.micro_batches).scale or [1.0] * plan.micro_batches
    forwards: defaultdict[int, list[float]] = defaultdict(list)
    backwards: defaultdict[int, list[float]] = defaultdict(list)
    for trace in traces:
        parts: defaultdict[tuple[int, int], float] = defaultdict(float)
        for row, starts, ends in zip(trace.schedule.actions, trace.starts, trace.ends, strict=True):
            for action, start, end in zip(row, starts, ends, strict=True):
                if action.micro_batch is None or action.kind not in _FORWARDS | _BACKWARDS:
                    continue
                stage, device = action.stage % stages, devices[action.stage]
                compute = max(0.0, end - start - device.action_seconds) * device.speed / devices[stage].speed
                compute /= scale[action.micro_batch] or 1.0
                if action.kind in _FORWARDS:
                    forwards[stage].append(compute)
                else:
                    parts[stage, action.micro_batch] += compute
        for (stage, _), compute in parts.items():
            backwards[stage].append(compute)
    return [
        (median(forwards[stage]), median(backwards[stage]) if stage in backwards else 0.0)
        for stage in range(stages)
    ]
