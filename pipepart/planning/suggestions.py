"""InfeasiblePlanError: why no plan fits the memory, with changes of the request that would, each of them planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..cluster import Cluster, Device
from ..profiling import Profile
from ..units import counted, format_bytes, format_seconds
from .costs.interpolate import estimate
from .infeasible import Infeasible
from .plan_document import Plan
from .plan_record import SEARCH
from .request import PlanOptions, read_request
from .search.strategies import search

_SHOWN = 5


@dataclass(frozen=True)
class Suggestion:
    """A change of the request that makes the model fit.

    Attributes:
        options: keywords of :func:`pipepart.plan` that change; None means the default.
        devices: devices to add to the cluster.
        estimated: True if the micro-batch size was not profiled, so that its costs are estimated: profile it first.
        plan: the plan that :func:`pipepart.plan` makes with the change.
    """

    options: Mapping[str, str | int | None]
    devices: tuple[Device, ...]
    estimated: bool
    plan: Plan

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step with the change."""
        return self.plan.predicted.step_seconds

    @property
    def change(self) -> str:
        """The change in words."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        if not self.devices:
            return options
        like = self.devices[0].name.partition(" (added")[0]
        return (
            f"{counted(len(self.devices), 'more device')} like {like}{', with ' if options else ''}{options}"
        )


class InfeasiblePlanError(ValueError):
    """No cut of the model fits the devices.

    Attributes:
        reason: why, without the suggestions.
        stage: the stage that does not fit in the nearest cut.
        deficit_bytes: bytes that its device lacks.
        suggestions: changes that fit, each of them planned; the shortest step first, more devices last.
    """

    def __init__(self, nearest: Infeasible, suggestions: Sequence[Suggestion]) -> None:
        self.reason = f"the model does not fit: {nearest.text}"
        super().__init__(f"{self.reason}. {suggestions_text(suggestions)}")
        self.stage = nearest.stage
        self.deficit_bytes = nearest.deficit_bytes
        self.suggestions = tuple(suggestions)


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


def find_suggestions(profile: Profile, cluster: Cluster, options: PlanOptions) -> list[Suggestion]:
    """Find changes of an infeasible request that fit; the shortest step first, more devices last.

    Tried one by one: ``recompute="auto"``, ``allow_split_ties=True``, another schedule, smaller micro-batches. If none
    fits alone, smaller micro-batches under 1F1B with recompute, which needs the least memory. Then more devices like
    the largest one, up to four times as many.

    Args:
        profile: of the layers.
        cluster: the devices.
        options: of the request.
    """
    if options.schedule == SEARCH:  # a searched order starts from plans that fit
        options = replace(options, schedule="auto")
    least = replace(_with_schedule(options, "1f1b"), recompute="auto")
    found: list[Suggestion] = []
    alone = [*_single(profile, options), *_smaller(profile, options)]
    for changed in (alone, [least, *_smaller(profile, least)]):
        found = [made for one in changed if (made := _planned(profile, cluster, options, one))]
        if found:
            break
    found.sort(key=lambda one: one.step_seconds)
    more = next(_more_devices(profile, cluster, options), None)
    return [*found, more] if more else found


def _planned(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    changed: PlanOptions,
    devices: tuple[Device, ...] = (),
) -> Suggestion | None:
    """Return the suggestion if the request with these changes has a plan."""
    count = changed.micro_batches
    estimated = count != "auto" and all(costs.micro_batches != count for costs in profile.costs)
    if estimated:
        assert count != "auto"
        profile = profile.model_copy(update={"costs": (*profile.costs, estimate(profile, count))})
    larger = cluster.model_copy(update={"devices": (*cluster.devices, *devices)})
    try:
        made = search(read_request(profile, larger, changed))
    except ValueError:  # such as stages that the other schedule does not have
        return None
    values: dict[str, Any] = {one.name: getattr(changed, one.name) for one in fields(PlanOptions)}
    changes = {name: value for name, value in values.items() if value != getattr(options, name)}
    return made and Suggestion(changes, devices, estimated, made)


def _single(profile: Profile, options: PlanOptions) -> Iterator[PlanOptions]:
    """Recompute where needed, shared parameters in several stages, or another schedule."""
    if options.recompute in ("never", "except-last"):
        yield replace(options, recompute="auto")
    if not options.allow_split_ties and any(info.shares_with for info in profile.layers):
        yield replace(options, allow_split_ties=True)
    for name in ("1f1b", "sequential"):
        if options.schedule not in ("auto", name):
            yield _with_schedule(options, name)


def _with_schedule(options: PlanOptions, name: str) -> PlanOptions:
    stages = None if options.chunks else options.stages
    return replace(options, schedule=name, chunks=None, stages=stages)


def _smaller(profile: Profile, options: PlanOptions) -> Iterator[PlanOptions]:
    """More micro-batches: the numbers that were profiled, and doubles of the largest, down to one sample each."""
    measured = {costs.micro_batches for costs in profile.costs}
    if options.micro_batches != "auto":
        most = options.micro_batches
    else:
        most = max(count for count in measured if count <= (options.max_micro_batches or count))
    doubles = {most << times for times in range(1, profile.batch.bit_length())}
    counts = {count for count in measured | {profile.batch} if count > most}
    for count in sorted(counts | {count for count in doubles if count <= profile.batch}):
        yield replace(options, micro_batches=count, max_micro_batches=None)


def _more_devices(profile: Profile, cluster: Cluster, options: PlanOptions) -> Iterator[Suggestion]:
    """More devices like the largest one, as few as are enough first."""
    like = max(cluster.devices, key=lambda device: (device.memory_bytes or float("inf"), device.speed))
    most = min(3 * len(cluster), len(profile.layers) - len(cluster))
    added: tuple[Device, ...] = ()
    for number in range(1, most + 1):
        added += (like.model_copy(update={"name": f"{like.name} (added {number})"}),)
        if made := _planned(profile, cluster, options, replace(options, stages=None), added):
            yield made
