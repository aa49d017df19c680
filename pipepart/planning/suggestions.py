"""InfeasiblePlanError: why no plan fits the memory, with changes of the request that would, each of them planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from schedules.searching.clock import Clock

from ..cluster import Cluster, Device
from ..input_error import InputError
from ..profiling import Profile
from ..units import format_bytes, format_seconds, is_count
from .costs.interpolate import estimate
from .infeasible import DoesNotFit, Infeasible
from .pasting import as_arguments, as_options
from .plans.options import PlanOptions
from .plans.plan import Plan
from .plans.searched_order import SEARCH

_SHOWN = 5
_SHARE = 0.25  # of the seconds that are left, which one change may take

# Makes the plan of a request, or raises ValueError.
Planner = Callable[[Profile, Cluster, PlanOptions], Plan]


@dataclass(frozen=True)
class Suggestion:
    """A change of the request that makes the model fit.

    Attributes:
        options: keywords of :func:`pipepart.plan` that change.
        devices: devices to add to the cluster.
        memory_bytes: the memory that each device should have; None for what it has.
        estimated: True if the micro-batch size was not profiled, so that its costs are estimated: profile it first.
        plan: the plan that :func:`pipepart.plan` makes with the change.
    """

    options: Mapping[str, str | int | bool]
    devices: tuple[Device, ...]
    memory_bytes: int | None
    estimated: bool
    plan: Plan

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step with the change."""
        return self.plan.predicted.step_seconds

    @property
    def change(self) -> str:
        """The change as arguments of :func:`pipepart.plan`, to replace those of the request.

        ``profile`` and ``cluster`` stand for those of the request.
        """
        texts = [as_arguments(self.options)] if self.options else []
        if self.estimated:
            texts.insert(0, f"profile=pipepart.planning.estimate(profile, {self.plan.micro_batches})")
        if self.devices:
            texts.insert(0, f"cluster=cluster.with_more({len(self.devices)})")
        if self.memory_bytes:
            texts.insert(0, f"cluster=cluster.with_memory({self.memory_bytes})")
        return ", ".join(texts)

    @property
    def command_line(self) -> str:
        """The change as options of ``pipepart plan``, to be added behind those of the request."""
        texts = [as_options(self.options)] if self.options else []
        if self.estimated:
            texts.append("--estimate")
        if self.devices:
            texts.append(f"--more-devices {len(self.devices)}")
        if self.memory_bytes:
            texts.append(f"--memory {self.memory_bytes}")
        return " ".join(texts)


class InfeasiblePlanError(InputError):
    """No cut of the model fits the devices.

    Attributes:
        reason: why, without the suggestions.
        stage: the stage that does not fit in the nearest cut.
        deficit_bytes: bytes that its device lacks.
        suggestions: changes that fit, each of them planned; the shortest step first, more devices last. If nothing
            else helps, devices with more memory.
    """

    def __init__(
        self, nearest: Infeasible, suggestions: Sequence[Suggestion], *, out_of_time: bool = False
    ) -> None:
        self.reason = f"the model does not fit: {nearest.text}"
        text = suggestions_text(suggestions)
        if out_of_time and not suggestions:
            text = "There was no time to look for changes that fit: call plan with more seconds"
        super().__init__(f"{self.reason}. {text}")
        self.stage = nearest.stage
        self.deficit_bytes = nearest.deficit_bytes
        self.suggestions = tuple(suggestions)


def suggestions_text(found: Sequence[Suggestion], *, command_line: bool = False) -> str:
    """Return what would fit as lines to copy: arguments of ``plan()``, or options of ``pipepart plan``."""
    nothing = (
        "No change of schedule, micro-batches or recompute makes it fit, nor do four times as many devices"
    )
    if not found:
        return nothing
    lines = [
        f"{number}. {one.command_line if command_line else one.change}: {format_seconds(one.step_seconds)} a step"
        f"{' (estimated: profile this size)' if one.estimated else ''}, "
        f"at most {format_bytes(max(one.plan.predicted.memory_bytes))} on a device"
        for number, one in enumerate(shown_of(found), 1)
    ]
    what = "Options to add" if command_line else "Arguments of plan()"
    head = f"{what} that fit, the shortest step first, more devices last:"
    if found[0].memory_bytes:
        head = f"{nothing}. Use larger devices:"
    return f"{head}\n  " + "\n  ".join(lines)


def shown_of(found: Sequence[Suggestion]) -> list[Suggestion]:
    """Return the suggestions that a message has: the first ones, and the last, which may be more devices."""
    return list(found) if len(found) <= _SHOWN else [*found[: _SHOWN - 1], found[-1]]


def find_suggestions(
    profile: Profile, cluster: Cluster, options: PlanOptions, nearest: Infeasible, make: Planner, clock: Clock
) -> list[Suggestion]:
    """Find changes of an infeasible request that fit; the shortest step first, more devices last.

    Tried one by one: an option that limits the plan set to "auto", ``replicas=1``, ``allow_split_ties=True``, another
    schedule, smaller micro-batches. If none fits alone, smaller micro-batches under 1F1B with recompute, which needs
    the least memory. Then more devices like the largest one, up to four times as many. If nothing fits, the memory that
    the nearest cut needs. A request for any schedule is tried with 1F1B, so that a suggestion takes no search; one for
    a named schedule also with ``schedule="auto"``.

    Args:
        profile: of the layers.
        cluster: the devices.
        options: of the request.
        nearest: the cut that lacks the least memory.
        make: plans a request.
        clock: that all of them share. After it no further change is planned.
    """
    search = _Suggestions(profile, cluster, options, make, clock)
    free = options.schedule in ("auto", SEARCH)
    tried = _with_schedule(options, "1f1b", cluster) if free else options
    least = replace(_with_schedule(tried, "1f1b", cluster), recompute="auto")
    found: list[Suggestion] = []
    alone = [*_single(profile, cluster, tried), *_smaller(profile, tried)]
    if not free:
        alone.append(replace(options, schedule="auto"))
    for changed in (alone, [least, *_smaller(profile, least)]):
        found = [made for one in changed if (made := search.planned(one))]
        if found:
            break
    found.sort(key=lambda one: one.step_seconds)
    found += search.more_devices(tried) or ([] if found else search.more_devices(least))
    return found or search.more_memory(nearest)


class _Suggestions:
    """Plans changes of a request."""

    def __init__(
        self, profile: Profile, cluster: Cluster, options: PlanOptions, make: Planner, clock: Clock
    ) -> None:
        self._profile, self._cluster, self._options = profile, cluster, options
        self._make, self._clock = make, clock

    def planned(
        self, changed: PlanOptions, devices: int = 0, memory_bytes: int | None = None
    ) -> Suggestion | None:
        """Return the suggestion if the request with these changes has a plan, and there is time to plan it."""
        if self._clock.is_over:
            return None
        profile, cluster, count = self._profile, self._cluster, changed.micro_batches
        estimated = count != "auto" and all(costs.micro_batches != count for costs in profile.costs)
        if estimated:
            assert count != "auto"
            profile = estimate(profile, count)
        if devices:
            cluster = cluster.with_more(devices)
        if memory_bytes:
            cluster = cluster.with_memory(memory_bytes)
        try:
            made = self._make(profile, cluster, self._in_time(changed)).model_copy(
                update={"constraints": changed}
            )
        except (DoesNotFit, InputError):  # the latter for stages that the other schedule does not have
            return None
        values: dict[str, Any] = {one.name: getattr(changed, one.name) for one in fields(PlanOptions)}
        changes = {name: value for name, value in values.items() if value != getattr(self._options, name)}
        return Suggestion(changes, cluster.devices[len(self._cluster) :], memory_bytes, estimated, made)

    def _in_time(self, changed: PlanOptions) -> PlanOptions:
        """The options with no more seconds than one change may take, if the request limits them."""
        if changed.seconds is None:
            return changed
        return replace(changed, seconds=max(self._clock.seconds_left * _SHARE, 1e-3))

    def more_devices(self, changed: PlanOptions) -> list[Suggestion]:
        """The least number of further devices that is enough. A device may be left out, so more are enough, too."""
        if is_count(changed.stages):
            changed = replace(changed, stages="auto")
        low, high = 0, min(3 * len(self._cluster), len(self._profile.layers) - len(self._cluster))
        found = self.planned(changed, high) if high > 0 else None
        while found and high - low > 1:
            middle = (low + high) // 2
            fewer = self.planned(changed, middle)
            low, high, found = (low, middle, fewer) if fewer else (middle, high, found)
        return [found] if found else []

    def more_memory(self, nearest: Infeasible) -> list[Suggestion]:
        """Devices that all have the memory that the nearest plan needs of any."""
        if nearest.plan is None:
            return []
        schedule, chunks = nearest.plan.schedule, nearest.plan.chunks
        same = replace(
            self._options, schedule=schedule, chunks=chunks if chunks > 1 else self._options.chunks
        )
        made = self.planned(same, memory_bytes=max(nearest.plan.predicted.memory_bytes))
        return [made] if made else []


def _single(profile: Profile, cluster: Cluster, options: PlanOptions) -> Iterator[PlanOptions]:
    """Options that limit the plan left free, shared parameters in several stages, or another schedule."""
    if options.recompute in ("never", "except-last"):
        yield replace(options, recompute="auto")
    if options.offload != "auto":
        yield replace(options, offload="auto")
    if is_count(options.stages):
        yield replace(options, stages="auto")
    if options.replicas != 1:
        yield replace(options, replicas=1)
    if not options.allow_split_ties and any(info.shares_with for info in profile.layers):
        yield replace(options, allow_split_ties=True)
    for name in ("1f1b", "sequential"):
        if options.schedule != name:
            yield _with_schedule(options, name, cluster)


def _with_schedule(options: PlanOptions, name: str, cluster: Cluster) -> PlanOptions:
    """The options with a schedule that has one stage a device."""
    several = is_count(options.stages) and options.stages > len(cluster)
    return replace(
        options,
        schedule=name,
        chunks=options.chunks and 1,
        stages="auto" if several else options.stages,
    )


def _smaller(profile: Profile, options: PlanOptions) -> Iterator[PlanOptions]:
    """More micro-batches: the numbers that were profiled, and doubles of the largest, down to one sample each."""
    measured = {costs.micro_batches for costs in profile.costs}
    limit = options.max_micro_batches
    if options.micro_batches != "auto":
        most = options.micro_batches
    else:
        most = max(count for count in measured if count <= (limit or count))
    doubles = {most << times for times in range(1, profile.batch.bit_length())}
    counts = {count for count in measured | {profile.batch} if count > most}
    for count in sorted(counts | {count for count in doubles if count <= profile.batch}):
        yield replace(options, micro_batches=count, max_micro_batches=limit and max(limit, count))
