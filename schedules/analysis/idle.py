"""Splits the idle time of each device by phase and by cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..core.action import BACKWARDS, COMMUNICATION, Action, Kind
from ..core.dependencies import Dependencies, dependencies
from ..core.schedule import Schedule
from ..core.transfer import Transfer
from .arrivals import arrivals

_Span = tuple[Action, float, float, float, float]  # start, end, and when its inputs were made, and were there


@dataclass(frozen=True)
class Idle:
    """Seconds for which one device computes nothing within the makespan, split in two ways.

    Both splits sum to `total`.

    Attributes:
        warm_up: up to the device's first backward.
        steady: between the two others.
        cool_down: from the end of its last forward on.
        producer: waiting for another device to make what the next action needs.
        transfer: waiting for that to arrive, or for a copy between the device and its host.
        delay: between the arrival of an action's inputs and its start; only measured timelines have it. Where the
            timeline has no transfer for a message, it counts as `transfer`.
        finished: nothing left to do.
    """

    warm_up: float = 0.0
    steady: float = 0.0
    cool_down: float = 0.0
    producer: float = 0.0
    transfer: float = 0.0
    delay: float = 0.0
    finished: float = 0.0

    @property
    def total(self) -> float:
        """All idle seconds."""
        return self.warm_up + self.steady + self.cool_down


def idle(
    schedule: Schedule,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    transfers: Sequence[Transfer] = (),
) -> tuple[Idle, ...]:
    """Return the idle time of each device between the first start and the last end anywhere."""
    found = dependencies(schedule)
    made = _inputs_made(found, starts, ends)
    there = _inputs_there(schedule, found, transfers)
    first = min(map(min, filter(None, starts)), default=0.0)
    last = max(map(max, filter(None, ends)), default=0.0)
    return tuple(
        _device_idle(
            [span for span in zip(*row, strict=True) if span[0].kind not in COMMUNICATION], first, last
        )
        for row in zip(schedule.actions, starts, ends, made, there, strict=True)
    )


def _inputs_made(
    found: Dependencies, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> list[list[float]]:
    """When the last input of each action was made: the end of what made it, not the arrival."""
    made_at = np.array([end for row in ends for end in row])
    started = np.array([start for row in starts for start in row])
    sends, receives = (np.zeros(found.actions, dtype=bool) for _ in range(2))
    sends[found.owner[found.is_kind(Kind.SEND_F, Kind.SEND_B)]] = True
    receives[found.owner[found.is_kind(Kind.RECV_F, Kind.RECV_B)]] = True
    made_at[sends] = started[sends]
    messages = receives[found.target]
    made_at[found.target[messages]] = made_at[found.source[messages]]
    made = np.full(found.actions, -np.inf)
    np.maximum.at(made, found.target, made_at[found.source])
    return [made[first:last].tolist() for first, last in pairwise(found.offsets)]


def _inputs_there(
    schedule: Schedule, found: Dependencies, transfers: Sequence[Transfer]
) -> list[list[float]]:
    """When the last message for each action had arrived; infinite for a message without a transfer."""
    actions = [(device, action) for device, row in enumerate(schedule.actions) for action in row]
    there = [-math.inf] * found.actions
    edges = zip(
        found.source.tolist(), found.target.tolist(), arrivals(schedule, found, transfers), strict=True
    )
    for source, target, arrival in edges:
        from_afar = actions[source][0] != actions[target][0]
        is_copy = actions[source][1].kind is Kind.RELOAD or actions[target][1].kind is Kind.OFFLOAD
        if from_afar or is_copy or actions[source][1].kind in COMMUNICATION:
            there[target] = max(there[target], math.inf if arrival is None else arrival)
    return [there[first:last] for first, last in pairwise(found.offsets)]


def _device_idle(spans: Sequence[_Span], first: float, last: float) -> Idle:
    if not spans:
        return Idle(warm_up=last - first, finished=last - first)
    leaves = [(leaf.kind, start, end) for action, start, end, *_ in spans for leaf in action.leaves]
    steady = min((start for kind, start, _ in leaves if kind in BACKWARDS), default=last)
    cool_down = max(steady, max((end for kind, _, end in leaves if kind is Kind.F), default=first))
    gaps = list(_gaps(spans, first))
    done = spans[-1][2]
    producer = sum(min(max(made, begin), end) - begin for begin, end, made, _ in gaps)
    ready = sum(min(max(made, there, begin), end) - begin for begin, end, made, there in gaps)
    all_gaps = [*((begin, end) for begin, end, *_ in gaps), (done, last)]
    return Idle(
        warm_up=_within(all_gaps, first, steady),
        steady=_within(all_gaps, steady, cool_down),
        cool_down=_within(all_gaps, cool_down, last),
        producer=producer,
        transfer=ready - producer,
        delay=sum(end - begin for begin, end, *_ in gaps) - ready,
        finished=last - done,
    )


def _gaps(spans: Iterable[_Span], clock: float) -> Iterable[tuple[float, float, float, float]]:
    """Begin and end of each gap before an action, and when that action's input was made, and was there."""
    for _, start, end, made, there in spans:
        if start > clock:
            yield clock, start, made, there
        clock = max(clock, end)


def _within(gaps: Iterable[tuple[float, float]], first: float, last: float) -> float:
    return sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in gaps)
