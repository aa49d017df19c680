"""Suggests changes of a request that make an infeasible model fit. Each suggestion comes with its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from ...cluster import Cluster, Device
from ...profiling import Profile
from ...units import format_bytes, format_seconds
from ..costs.interpolate import estimate
from ..plan_record import SEARCH
from ..request import PlanOptions, read_request
from ..search.strategies import search
from .infeasible import Suggestion

_SHOWN = 5


def find_suggestions(profile: Profile, cluster: Cluster, options: PlanOptions) -> list[Suggestion]:
    """Find changes of an infeasible request that fit; the shortest step first, more devices last.

    Tried one by one: ``recompute="auto"``, another schedule, smaller micro-batches. If none fits alone, smaller
    micro-batches under 1F1B with recompute. Then more devices like the largest one, up to four times as many.

    Args:
        profile: of the layers.
        cluster: the devices.
        options: of the request.
    """
    if options.schedule == SEARCH:  # a searched order starts from plans that fit
        options = replace(options, schedule="auto")
    found: list[Suggestion] = []
    single = [*_recompute(options), *_schedules(options), *_smaller(profile, options)]
    together = _one_f_one_b(options)
    for changed in (single, [together, *_smaller(profile, together)]):
        found = [made for one in changed if (made := _planned(profile, cluster, options, one))]
        if found:
            break
    found.sort(key=lambda one: one.step_seconds)
    return [*found, *_more_devices(profile, cluster, options)]


def suggestions_text(found: Sequence[Suggestion]) -> str:
    """Return the suggestions as the end of an error message."""
    if not found:
        return (
            "No change of schedule, micro-batches or recompute makes it fit, nor do four times as many devices: "
            "use larger devices"
        )
    lines = [
        f"{number}. {one.change}: {format_seconds(one.step_seconds)} a step"
        f"{' (estimated: profile this size)' if one.estimated else ''}, "
        f"at most {format_bytes(max(one.plan.predicted.memory_bytes))} on a device"
        for number, one in enumerate(found[:_SHOWN], 1)
    ]
    return "Changes that fit, the shortest step first, more devices last:\n  " + "\n  ".join(lines)


def _planned(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    changed: PlanOptions,
    devices: tuple[Device, ...] = (),
) -> Suggestion | None:
    """Return the suggestion if the request with these changes has a plan."""
    count = changed.micro_batches
    estimated = False
    if count != "auto" and all(costs.micro_batches != count for costs in profile.costs):
        estimated = True
        profile = profile.model_copy(update={"costs": (*profile.costs, estimate(profile, count))})
    larger = cluster.model_copy(update={"devices": (*cluster.devices, *devices)})
    try:
        made = search(read_request(profile, larger, changed))
    except ValueError:  # such as stages that the other schedule does not have
        return None
    return made and Suggestion(_changes(options, changed), devices, estimated, made)


def _changes(before: PlanOptions, after: PlanOptions) -> dict[str, Any]:
    names = [field.name for field in fields(PlanOptions)]
    return {name: getattr(after, name) for name in names if getattr(before, name) != getattr(after, name)}


def _recompute(options: PlanOptions) -> Iterator[PlanOptions]:
    if options.recompute in ("never", "except-last"):
        yield replace(options, recompute="auto")


def _schedules(options: PlanOptions) -> Iterator[PlanOptions]:
    if options.schedule != "auto":
        for name in ("1f1b", "sequential"):
            if name != options.schedule:
                yield _with_schedule(options, name)


def _with_schedule(options: PlanOptions, name: str) -> PlanOptions:
    stages = None if options.chunks else options.stages
    return replace(options, schedule=name, chunks=None, stages=stages)


def _one_f_one_b(options: PlanOptions) -> PlanOptions:
    """1F1B with recompute: the least memory at a given number of micro-batches."""
    return replace(_with_schedule(options, "1f1b"), recompute="auto")


def _smaller(profile: Profile, options: PlanOptions) -> Iterator[PlanOptions]:
    """More micro-batches: the numbers that were profiled, and doubles of the largest, down to one sample each."""
    measured = {costs.micro_batches for costs in profile.costs}
    if options.micro_batches != "auto":
        most = options.micro_batches
    else:
        most = max(count for count in measured if count <= (options.max_micro_batches or count))
    counts, double = {count for count in measured if count > most}, 2 * most
    while double <= profile.batch:
        counts.add(double)
        double *= 2
    if profile.batch > most:
        counts.add(profile.batch)
    for count in sorted(counts):
        yield replace(options, micro_batches=count, max_micro_batches=None)


def _more_devices(profile: Profile, cluster: Cluster, options: PlanOptions) -> Iterator[Suggestion]:
    """The fewest additional devices like the largest one that are enough."""
    like = max(cluster.devices, key=lambda device: (device.memory_bytes or float("inf"), device.speed))
    most = min(3 * len(cluster), len(profile.layers) - len(cluster))
    for extra in range(1, most + 1):
        added = tuple(
            like.model_copy(update={"name": f"{like.name} (added {number})"})
            for number in range(1, extra + 1)
        )
        if made := _planned(profile, cluster, options, replace(options, stages=None), added):
            yield made
            return
