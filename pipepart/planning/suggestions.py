"""Changes of a request, each planned: those that fit if nothing else does, and those that give a shorter step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schedules.searching.clock import Clock

from ..cluster import Cluster, Device
from ..input_error import InputError
from ..profiling import Profile
from ..units import format_bytes, format_seconds, is_count
from .costs.interpolate import estimate
from .infeasible import Infeasible
from .pasting import as_arguments, as_options
from .plans.options import PlanOptions
from .plans.plan import Plan
from .plans.searched_order import SEARCH

_SHOWN = 5  # largest number of suggestions in a message
_SHARE = 0.5  # share of the remaining time for planning one change
_NOTHING = "No change of schedule, micro-batches or recompute makes it fit, nor do four times as many devices"

# Plans a request within a time limit; returns None if no plan fits. Raises InputError for contradictory options.
Planner = Callable[[Profile, Cluster, PlanOptions, Clock], Plan | None]


@dataclass(frozen=True)
class Suggestion:
    """A change of a request, and the plan that it gives.

    Attributes:
        options: keywords of :func:`pipepart.plan` to change.
        devices: devices to add to the cluster.
        memory_bytes: memory to give each device; None for no change.
        estimated: True if the micro-batch size was not profiled and its costs are estimated. Profile it first.
        plan: the plan for the changed request.
    """

    options: Mapping[str, str | int | bool]
    devices: tuple[Device, ...]
    memory_bytes: int | None
    estimated: bool
    plan: Plan

    @property
    def step_seconds(self) -> float:
        """Predicted step of the changed request, in seconds."""
        return self.plan.predicted.step_seconds

    @property
    def change(self) -> str:
        """The change as arguments of :func:`pipepart.plan`, which replace arguments of the request.

        ``profile`` and ``cluster`` in the text are the arguments of the request.
        """
        texts = (
            f"cluster=cluster.with_memory({self.memory_bytes})" if self.memory_bytes else "",
            f"cluster=cluster.with_more({len(self.devices)})" if self.devices else "",
            f"profile=pipepart.planning.estimate(profile, {self.plan.micro_batches})"
            if self.estimated
            else "",
            as_arguments(self.options),
        )
        return ", ".join(filter(None, texts))

    @property
    def command_line(self) -> str:
        """The change as options of ``pipepart plan``, to append to the options of the request."""
        texts = (
            as_options(self.options),
            "--estimate" if self.estimated else "",
            f"--more-devices {len(self.devices)}" if self.devices else "",
            f"--memory {self.memory_bytes}" if self.memory_bytes else "",
        )
        return " ".join(filter(None, texts))


class InfeasiblePlanError(InputError):
    """No cut of the model fits the devices, or, as the message then says, none that fits was found in the time.

    Attributes:
        reason: the message without the suggestions.
        stage: the stage that does not fit, in the cut that lacks the least memory.
        deficit_bytes: missing bytes on its device.
        suggestions: changes that fit, with their plans; shortest step first, more devices last. If no other change
            fits, devices with more memory.
    """

    def __init__(
        self,
        nearest: Infeasible,
        suggestions: Sequence[Suggestion],
        *,
        searched_all: bool = True,
        out_of_time: bool = False,
    ) -> None:
        found = "the model does not fit" if searched_all else "no plan that fits was found in time"
        self.reason = f"{found}: {nearest.text}"
        text = suggestions_text(suggestions)
        if out_of_time and not suggestions:
            text = "There was no time to look for changes that fit: call plan with more seconds"
        super().__init__(f"{self.reason}. {text}")
        self.stage = nearest.stage
        self.deficit_bytes = nearest.deficit_bytes
        self.suggestions = tuple(suggestions)


def suggestions_text(suggestions: Sequence[Suggestion], *, command_line: bool = False) -> str:
    """Format suggestions as lines to copy: arguments of ``plan()``, or options of ``pipepart plan``."""
    if not suggestions:
        return _NOTHING
    what = "Options to add" if command_line else "Arguments of plan()"
    head = f"{what} that fit, the shortest step first, more devices last:"
    if suggestions[0].memory_bytes:
        head = f"{_NOTHING}. Use larger devices:"
    lines = [
        f"{number}. {each.command_line if command_line else each.change}: {format_seconds(each.step_seconds)} a step"
        f"{' (estimated: profile this size)' if each.estimated else ''}, "
        f"at most {format_bytes(max(each.plan.predicted.memory_bytes))} on a device"
        for number, each in enumerate(shown_of(suggestions), 1)
    ]
    return "\n  ".join([head, *lines])


def shown_of(suggestions: Sequence[Suggestion]) -> list[Suggestion]:
    """Return the suggestions to show in a message: the first four and the last, which may be more devices."""
    shown = list(suggestions)
    return shown if len(shown) <= _SHOWN else [*shown[: _SHOWN - 1], shown[-1]]


@dataclass(frozen=True)
class Changes:
    """Plans a request with changes.

    Attributes:
        profile: of the layers.
        cluster: the devices.
        options: of the request.
        make: plans a request.
        clock: the time limit for all changes; when it is over, no further change is planned.
    """

    profile: Profile
    cluster: Cluster
    options: PlanOptions
    make: Planner
    clock: Clock

    def that_fit(self, nearest: Infeasible) -> list[Suggestion]:
        """Return changes of a request without a plan that fit, shortest step first, more devices last.

        These changes are planned in turn:

        - each change of :meth:`single`;
        - if none fits, 1F1B with recompute and smaller micro-batches, which needs the least memory;
        - the smallest number of additional devices that is enough, at most three times the devices of the cluster;
        - if none fits, devices with the memory that the nearest cut needs.

        If the request allows any schedule, the changes are planned for a named schedule, which needs no joint search.

        Args:
            nearest: the explanation for the cut that lacks the least memory.
        """
        named, frugal = self.options, replace(self._with_schedule(self.options), recompute="auto")
        if named.schedule in ("auto", SEARCH):
            named = self._with_schedule(named)
        suggestions = self.planned(self.single(named))
        if not suggestions and frugal != named:
            suggestions = self.planned([frugal, *self.single(frugal)])
        more_devices = self._fewest_devices(named)
        if not more_devices and not suggestions and frugal != named:
            more_devices = self._fewest_devices(frugal)
        if more_devices or suggestions or nearest.plan is None:
            return [*suggestions, *([more_devices] if more_devices else [])]
        chunks = nearest.plan.chunks if nearest.plan.chunks > 1 else self.options.chunks
        same = replace(self.options, schedule=nearest.plan.schedule, chunks=chunks)
        larger = self._plan(same, memory_bytes=max(nearest.plan.predicted.memory_bytes))
        return [larger] if larger else []

    def planned(self, changes: Iterable[PlanOptions]) -> list[Suggestion]:
        """Plan each change; return those that fit, shortest step first."""
        suggestions = [each for changed in changes if (each := self._plan(changed))]
        return sorted(suggestions, key=lambda each: each.step_seconds)

    def single(self, options: PlanOptions) -> Iterator[PlanOptions]:
        """Yield options with one change: a keyword set free, split ties, schedule 1F1B, or more micro-batches."""
        free: dict[str, Any] = {"recompute": "auto", "offload": "auto", "stages": "auto", "replicas": 1}
        if options.recompute == "always":  # needs no more memory than "auto"
            del free["recompute"]
        if any(info.shares_with for info in self.profile.layers):
            free["allow_split_ties"] = True
        for name, value in free.items():
            if getattr(options, name) != value:
                yield replace(options, **{name: value})
        if options.schedule != "1f1b":
            yield self._with_schedule(options)
        measured = {costs.micro_batches for costs in self.profile.costs}
        most = max(measured) if options.micro_batches == "auto" else options.micro_batches
        doubles = {most << times for times in range(1, self.profile.batch.bit_length())}
        for count in sorted(measured | doubles | {self.profile.batch}):
            if most < count <= self.profile.batch:
                yield replace(options, micro_batches=count)

    def _plan(
        self, changed: PlanOptions, *, devices: int = 0, memory_bytes: int | None = None
    ) -> Suggestion | None:
        """Plan the changed request; return the suggestion, or None if no plan fits or the time is over."""
        if self.clock.is_over:
            return None
        profile, cluster, count = self.profile, self.cluster, changed.micro_batches
        estimated = count != "auto" and all(costs.micro_batches != count for costs in profile.costs)
        if estimated and count != "auto":
            profile = estimate(profile, count)
        if devices:
            cluster = cluster.with_more(devices * changed.tensor)
        if memory_bytes:
            cluster = cluster.with_memory(memory_bytes)
        try:
            plan = self.make(profile, cluster, changed, self.clock.part(_SHARE))
        except InputError:  # options that the changed schedule does not have
            return None
        if plan is None:
            return None
        before = vars(self.options)
        changes = {name: value for name, value in vars(changed).items() if value != before[name]}
        return Suggestion(changes, cluster.devices[len(self.cluster) :], memory_bytes, estimated, plan)

    def _fewest_devices(self, changed: PlanOptions) -> Suggestion | None:
        """Find the smallest number of additional devices for which a plan fits, by doubling and bisection.

        Bisection works as a plan need not use all devices. Returns None if three times the cluster is not enough.
        """
        if is_count(changed.stages):
            changed = replace(changed, stages="auto")
        most = min(3 * len(self.cluster), len(self.profile.layers) - len(self.cluster))
        low, high, fewest = 0, 1, None
        while low < most and not fewest:
            fewest = self._plan(changed, devices=high)
            if not fewest:
                low, high = high, min(2 * high, most)
        while fewest and high - low > 1:
            middle = (low + high) // 2
            fewer = self._plan(changed, devices=middle)
            low, high, fewest = (low, middle, fewer) if fewer else (middle, high, fewest)
        return fewest

    def _with_schedule(self, options: PlanOptions) -> PlanOptions:
        """Return the options with a schedule of one stage per device that needs little memory."""
        several = is_count(options.stages) and options.stages > len(self.cluster)
        return replace(
            options,
            schedule="gpipe" if options.reduction == "batch" else "1f1b",
            chunks=options.chunks and 1,
            stages="auto" if several else options.stages,
        )
