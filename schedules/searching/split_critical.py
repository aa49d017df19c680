"""Full backwards that pass their gradient on before they are done with their weights."""

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
_WORTH = 0.995  # of the makespan, at most, for what is gained to be more than the error of what was measured
_CHEAPER = 0.98  # of a full backward, at most, that the parts of it take where all are run so
_SLACK = 1 + 1e-9


def split_critical(schedule: Schedule, costs: StageCosts, memory: Sequence[float] = ()) -> Schedule:
    """Return the schedule with a full backward as I and at once W wherever that shortens the makespan.

    The order of the work is the same, and so is what is computed: only the gradient of the stage's input leaves before
    those of its weights are computed, as in zero-bubble schedules (Qi et al. 2024, arXiv 2401.10241, §2). That helps
    where it is awaited on the critical path, above all behind the last micro-batch, and where the parts take no longer
    than the whole. Where nothing is gained the schedule comes back as it is.

    memory: bytes of stash per device that the result may hold; left out, no limit.

    >>> from schedules import build
    >>> costs = StageCosts([1, 1], [1, 1], [1, 1])
    >>> early = split_critical(build("1f1b", devices=2, micro_batches=4), costs)
    >>> print(*early.actions[1])
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1I3 1W3
    """
    if schedule.versions:
        return schedule
    plain = split_overlaps(schedule) if not costs.overlap else schedule
    best = simulate(plain, costs)
    for made in _candidates(plain, best, costs):
        peaks = zip(made.peak_bytes, memory, strict=False)
        if made.makespan <= best.makespan * _WORTH and all(peak <= room * _SLACK for peak, room in peaks):
            best = made
    return schedule if best.schedule is plain else best.schedule


def _candidates(plain: Schedule, timeline: Timeline, costs: StageCosts) -> Iterator[Timeline]:
    """Timelines of the schedule with some backwards split: few at first."""
    awaited = set(_awaited(timeline))
    last = {action for action in awaited if action.micro_batch == plain.micro_batches - 1}
    if last and last != awaited:
        yield simulate(split_backward(plain, last), costs)
    yield from _more_and_more(plain, awaited, costs)
    # Where stages are alike the critical path is one of many, and all of them have to become shorter.
    every = [action for row in plain.actions for action in row if action.kind is Kind.B]
    sent = [action for action in every if plain.previous_stage(action.stage) is not None]
    if sent:
        yield simulate(split_backward(plain, sent), costs)
    cheap = _cheap_in_parts(costs.for_schedule(plain))
    if cheap:
        yield from _more_and_more(plain, {action for action in every if action.stage in cheap}, costs)


def _more_and_more(schedule: Schedule, chosen: set[Action], costs: StageCosts) -> Iterator[Timeline]:
    """Some backwards split, then also those that are then awaited, and so on."""
    for _ in range(_ROUNDS):
        if not chosen:
            return
        made = simulate(split_backward(schedule, chosen), costs)
        yield made
        awaited = set(_awaited(made))
        if awaited <= chosen:
            return
        chosen = chosen | awaited


def _awaited(timeline: Timeline) -> Iterator[Action]:
    """The full backwards whose gradient the critical path takes to another device."""
    home = timeline.schedule.device_of
    for action, following in pairwise(timeline.critical_path):
        if action.kind is Kind.B and home[action.stage] != home[following.stage]:
            yield action


def _cheap_in_parts(costs: StageCosts) -> set[int]:
    """The stages whose backward takes less time in two parts."""
    parts = zip(costs.backward, costs.backward_input, costs.backward_weight, strict=True)
    return {stage for stage, (whole, *split) in enumerate(parts) if sum(split) < whole * _CHEAPER}
