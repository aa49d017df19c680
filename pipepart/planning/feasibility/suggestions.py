"""What would make a model fit that does not: changes of the request, each planned and found to fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...cluster import Cluster, Device
from ...units import format_bytes, format_seconds
from ..costs.interpolate import estimate
from ..plan_document import Plan
from ..search.order_text import SEARCH
from ..search.strategies import Request, search

_SHOWN = 5


@dataclass(frozen=True)
class Suggestion:
    """A change that makes the model fit.

    Attributes:
        change: in words.
        options: what to pass to :func:`pipepart.plan` beside what was passed.
        devices: devices to add.
        estimated: whether the costs are estimated, because this micro-batch size was not profiled.
        plan: the plan with the change; it fits.
    """

    change: str
    options: dict[str, str | int]
    devices: tuple[Device, ...]
    estimated: bool
    plan: Plan

    @property
    def step_seconds(self) -> float:
        """Of a mini-batch with the change, predicted."""
        return self.plan.predicted.step_seconds


@dataclass(frozen=True)
class _Attempt:
    change: str
    options: dict[str, str | int]
    request: Request
    devices: tuple[Device, ...] = ()
    estimated: bool = False


def suggestions(request: Request) -> list[Suggestion]:
    """Changes that make a request fit that does not, the shortest step first; estimated ones behind, the nearest first.

    Recompute, another schedule and smaller micro-batches are tried one by one, and two or three at a time only where
    that is needed; more devices, like the largest of the cluster, are added one at a time up to four times as many, and
    come last.
    """
    if request.schedule == SEARCH:  # which makes of what fits something that is quicker
        request = replace(request, schedule="auto")
    found: list[Suggestion] = []
    single = [*_recompute(request), *_schedules(request), *_smaller(request)]
    for attempts in (single, list(_pairs(request))):
        found = [made for attempt in attempts if (made := _tried(attempt))]
        if found:
            break
    # An estimate is worth the less the further it is from what was measured.
    found.sort(key=lambda one: (one.estimated, one.plan.micro_batches * one.estimated, one.step_seconds))
    more = next((made for attempt in _more_devices(request) if (made := _tried(attempt))), None)
    return [*found, *([more] if more else [])]


def suggestions_text(found: Sequence[Suggestion]) -> str:
    """The changes in words, for an error."""
    if not found:
        return (
            "No change of schedule, micro-batches or recompute makes it fit, nor do four times as many devices: "
            "use larger devices"
        )
    lines = [
        f"{number}. {suggestion.change}: {format_seconds(suggestion.step_seconds)} a step"
        f"{' (estimated: profile this size)' if suggestion.estimated else ''}, "
        f"at most {format_bytes(max(suggestion.plan.predicted.memory_bytes))} on a device"
        for number, suggestion in enumerate(found[:_SHOWN], 1)
    ]
    return "What would fit, the cheapest change first, what is only estimated behind:\n  " + "\n  ".join(
        lines
    )


def _tried(attempt: _Attempt) -> Suggestion | None:
    made = search(attempt.request)
    if made is None:
        return None
    return Suggestion(attempt.change, attempt.options, attempt.devices, attempt.estimated, made)


def _recompute(request: Request) -> Iterator[_Attempt]:
    if request.recompute in ("never", "except-last"):
        yield _Attempt(
            "recompute='auto', which runs forwards again where memory is short",
            {"recompute": "auto"},
            replace(request, recompute="auto"),
        )


def _schedules(request: Request) -> Iterator[_Attempt]:
    if request.schedule == "auto":
        return
    for name in ("1f1b", "sequential"):
        if name != request.schedule:
            stages = None if request.chunks else request.stages
            yield _Attempt(
                f"schedule={name!r}",
                {"schedule": name},
                replace(request, schedule=name, chunks=None, stages=stages),
            )


def _smaller(request: Request) -> Iterator[_Attempt]:
    """More micro-batches: the numbers that were profiled, and their doubles up to one sample each."""
    most = max(request.micro_batches)
    measured = {costs.micro_batches for costs in request.profile.costs}
    counts = sorted({count for count in measured if count > most} | _doubles(most, request.profile.batch))
    for count in counts:
        costs = estimate(request.profile, count)
        guessed = count not in measured
        yield _Attempt(
            f"micro_batches={count}, of {costs.samples} samples",
            {"micro_batches": count},
            replace(request, micro_batches=(count,), estimated=(costs,) if guessed else ()),
            estimated=guessed,
        )


def _doubles(count: int, batch: int) -> set[int]:
    found = set()
    while count * 2 <= batch:
        count *= 2
        found.add(count)
    return found | ({batch} if batch > count else set())


def _pairs(request: Request) -> Iterator[_Attempt]:
    """Smaller micro-batches under 1F1B with recompute: the most that can be done on the devices there are."""
    for smaller in _smaller(request):
        yield replace(
            smaller,
            change=f"{smaller.change}, with schedule='1f1b' and recompute='auto'",
            options={**smaller.options, "schedule": "1f1b", "recompute": "auto"},
            request=replace(smaller.request, schedule="1f1b", recompute="auto", chunks=None),
        )
    if request.schedule != "auto" and request.recompute != "auto":
        yield _Attempt(
            "schedule='1f1b' and recompute='auto'",
            {"schedule": "1f1b", "recompute": "auto"},
            replace(request, schedule="1f1b", recompute="auto", chunks=None),
        )


def _more_devices(request: Request) -> Iterator[_Attempt]:
    """More devices like the largest, as few as do."""
    devices = request.cluster.devices
    like = max(devices, key=lambda device: (device.memory_bytes or float("inf"), device.speed))
    room = len(request.profile.layers) - len(devices)
    for extra in range(1, min(3 * len(devices), room) + 1):
        added = tuple(
            like.model_copy(update={"name": f"{like.name} (added {number})"})
            for number in range(1, extra + 1)
        )
        cluster = Cluster(devices=(*devices, *added), link=request.cluster.link, links=request.cluster.links)
        yield _Attempt(
            f"{extra} more device{'s' if extra > 1 else ''} like {like.name}",
            {},
            replace(request, cluster=cluster, stages=None),
            devices=added,
        )
