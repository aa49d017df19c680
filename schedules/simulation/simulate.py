"""Simulates a schedule: computes the start and end of each action from the costs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..analysis.timeline import Timeline
from ..core.action import Kind, ScheduleError
from ..core.costs import StageCosts
from ..core.dependencies import Dependencies, dependencies
from ..core.schedule import Schedule
from ..core.stash import stash_peaks
from ..transforms.passes import split_overlaps
from .play import play
from .ports import journeys
from .transfers import transfers

_OF_A_MICRO_BATCH = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.RECOMPUTE)  # longer for more samples


def simulate(schedule: Schedule, costs: StageCosts, contention: bool = False) -> Timeline:
    """Return the timeline of a schedule in which each device runs its actions in order, as early as possible.

    A message leaves when the action that makes it ends. It arrives after the time on the link plus its latency, and
    blocks neither device. Copies between a device and its host run beside the computation, one at a time. An overlapped
    pair runs as a forward and then a backward. The time taken is nearly linear in the number of actions.

    Args:
        schedule: one that passes `check`.
        costs: of the stages of one copy of the model, or of all copies, copy after copy.
        contention: whether a link between two devices, and each of ``costs.ports``, carries one message at a time, in
            the order of their sending; otherwise they carry any number.

    Raises:
        ScheduleError: the costs are for another number of stages or micro-batches, or the devices wait for each other
            for ever.

    >>> from schedules import build
    >>> costs = StageCosts([1, 1], [1, 1], [1, 1])
    >>> simulate(build("1f1b", devices=2, micro_batches=4), costs).makespan
    15.0
    """
    costs = costs.for_schedule(schedule)
    if len(costs.micro_batch_scale) not in (0, schedule.micro_batches):
        raise ScheduleError(
            f"micro_batch_scale has {len(costs.micro_batch_scale)} numbers for {schedule.micro_batches} micro-batches"
        )
    schedule = split_overlaps(schedule)
    graph = dependencies(schedule, [(source, target) for source, target, _ in costs.skips])
    travels = journeys(schedule, costs, graph, contention)
    played = play(schedule, graph, _durations(costs, graph), travels)
    starts, ends = (
        tuple(tuple(seconds[first:last]) for first, last in pairwise(graph.offsets))
        for seconds in (played.starts, played.ends)
    )
    peaks = tuple(peak for peak, _ in stash_peaks(graph, costs))
    return Timeline(schedule, starts, ends, peaks, transfers(graph, played, travels))


def _durations(costs: StageCosts, graph: Dependencies) -> np.ndarray:
    """Seconds of each action."""
    of_kind = {
        Kind.F: costs.forward,
        Kind.I: costs.backward_input,
        Kind.W: costs.backward_weight,
        Kind.B: costs.backward,
        Kind.RECOMPUTE: costs.recompute,
        Kind.OFFLOAD: costs.offload,
        Kind.RELOAD: costs.offload,
        Kind.REDUCE_GRAD: costs.reduce_grad,
        Kind.OPT_STEP: costs.optimizer_step,
    }
    durations = np.zeros(graph.actions)
    for kind, seconds in of_kind.items():
        rows = graph.is_kind(kind)
        durations[rows] = np.asarray(seconds)[graph.stage[rows]]
    if len(costs.micro_batch_scale):
        scaled = graph.is_kind(*_OF_A_MICRO_BATCH)
        durations[scaled] *= np.asarray(costs.micro_batch_scale)[graph.micro_batch[scaled]]
    return durations
