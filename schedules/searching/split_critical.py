"""Splits full backwards on the critical path into I and W, so that the gradient is sent before W runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..analysis.timeline import Timeline
from ..core.action import Action, Kind
from ..core.costs import StageCosts
from ..core.schedule import Schedule
from ..simulation.simulate import simulate
from ..transforms.passes import split_backward, split_overlaps

_ROUNDS = 4
# Accept a split if new / old makespan is at most this: measured costs are no more accurate.
_ACCEPTED_RATIO = 0.995
_CHEAP_RATIO = 0.98  # split all backwards of a stage if (I + W) / B seconds are below this
_SLACK = 1 + 1e-9


def split_critical(schedule: Schedule, costs: StageCosts, memory: Sequence[float] = ()) -> Schedule:
    """Return the schedule with full backwards on its critical path split into I and W, if that shortens it.

    I sends the gradient of the stage's input before W computes those of its weights (Qi et al. 2024, arXiv 2401.10241,
    §2). W follows I at once, so the order of the work and its result stay the same. Splitting helps if another device
    waits for the gradient, above all after the last micro-batch, and if I and W together take no longer than B.
    The input is returned unchanged if no split shortens the makespan by 0.5 %.

    Args:
        schedule: to improve; an asynchronous schedule is returned unchanged.
        costs: of its stages.
        memory: limit of stash bytes per device; empty for no limit.

    >>> from schedules import build
    >>> costs = StageCosts([1, 1], [1, 1], [1, 1])
    >>> split = split_critical(build("1f1b", devices=2, micro_batches=4), costs)
    >>> print(*split.actions[1])
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1I3 1W3
    """
    if schedule.versions:
        return schedule
    plain = split_overlaps(schedule)
    best = simulate(plain, costs)
    for candidate in _candidates(plain, best, costs):
        peaks = zip(candidate.peak_bytes, memory, strict=False)
        if candidate.makespan <= best.makespan * _ACCEPTED_RATIO and all(
            peak <= room * _SLACK for peak, room in peaks
        ):
            best = candidate
    return schedule if best.schedule is plain else best.schedule


def _candidates(plain: Schedule, timeline: Timeline, costs: StageCosts) -> Iterator[Timeline]:
    """Yield timelines of the schedule with some backwards split, from few to many."""
    awaited = set(_awaited(timeline))
    yield from _split_repeatedly(plain, awaited, costs)
    # Equal stages have many critical paths, all of which must become shorter.
    every = [action for row in plain.actions for action in row if action.kind is Kind.B]
    sent = [action for action in every if plain.previous_stage(action.stage) is not None]
    if sent:
        yield simulate(split_backward(plain, sent), costs)
    cheap = _cheap_in_parts(costs.for_schedule(plain))
    if cheap:
        yield from _split_repeatedly(plain, {action for action in every if action.stage in cheap}, costs)


def _split_repeatedly(schedule: Schedule, chosen: set[Action], costs: StageCosts) -> Iterator[Timeline]:
    """Yield timelines with the chosen backwards split; add newly critical backwards and repeat, up to 4 times."""
    for _ in range(_ROUNDS):
        if not chosen:
            return
        timeline = simulate(split_backward(schedule, chosen), costs)
        yield timeline
        awaited = set(_awaited(timeline))
        if awaited <= chosen:
            return
        chosen = chosen | awaited


def _awaited(timeline: Timeline) -> Iterator[Action]:
    """Yield full backwards on the critical path whose gradient is sent to another device."""
    home = timeline.schedule.device_of
    for action, following in pairwise(timeline.critical_path):
        if action.kind is Kind.B and home[action.stage] != home[following.stage]:
            yield action


def _cheap_in_parts(costs: StageCosts) -> set[int]:
    """Return the stages for which I and W together take less time than B."""
    parts = zip(costs.backward, costs.backward_input, costs.backward_weight, strict=True)
    return {stage for stage, (whole, *split) in enumerate(parts) if sum(split) < whole * _CHEAP_RATIO}
