"""Where the idle time of a timeline goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .action import BACKWARDS, COMMUNICATION, Action, Kind
from .dependencies import dependencies
from .schedule import Schedule


@dataclass(frozen=True)
class Idle:
    """Seconds for which one device computes nothing within the makespan, split in two ways.

    By phase: `warm_up` is up to the device's first backward, `cool_down` from its last forward on, and
    `steady` what lies between. By cause: `producer` is waiting for another device to make what the next
    action needs, `transfer` is waiting for it to arrive (or, in a measured timeline, for whatever else delays
    the start), and `finished` is having nothing left to do. Both splits sum to `total`.
    """

    warm_up: float = 0.0
    steady: float = 0.0
    cool_down: float = 0.0
    producer: float = 0.0
    transfer: float = 0.0
    finished: float = 0.0

    @property
    def total(self) -> float:
        """All idle seconds."""
        return self.warm_up + self.steady + self.cool_down


def idle(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> tuple[Idle, ...]:
    """Return the idle time of each device between the first start and the last end anywhere."""
    made = _inputs_made(schedule, starts, ends)
    first = min(map(min, filter(None, starts)), default=0.0)
    last = max(map(max, filter(None, ends)), default=0.0)
    return tuple(
        _device_idle(
            [span for span in zip(*row, strict=True) if span[0].kind not in COMMUNICATION], first, last
        )
        for row in zip(schedule.actions, starts, ends, made, strict=True)
    )


def _inputs_made(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> list[list[float]]:
    """When the last input of each action was made: the end of what made it, not the arrival."""
    found = dependencies(schedule)
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


def _device_idle(spans: Sequence[tuple[Action, float, float, float]], first: float, last: float) -> Idle:
    if not spans:
        return Idle(warm_up=last - first, finished=last - first)
    leaves = [(leaf.kind, start, end) for action, start, end, _ in spans for leaf in action.leaves]
    steady = min((start for kind, start, _ in leaves if kind in BACKWARDS), default=last)
    cool_down = max(steady, max((end for kind, _, end in leaves if kind is Kind.F), default=first))
    gaps = list(_gaps(spans, first))
    done = spans[-1][2]
    producer = sum(min(max(made, begin), end) - begin for begin, end, made in gaps)
    all_gaps = [*((begin, end) for begin, end, _ in gaps), (done, last)]
    return Idle(
        warm_up=_within(all_gaps, first, steady),
        steady=_within(all_gaps, steady, cool_down),
        cool_down=_within(all_gaps, cool_down, last),
        producer=producer,
        transfer=sum(end - begin for begin, end, _ in gaps) - producer,
        finished=last - done,
    )


def _gaps(
    spans: Iterable[tuple[Action, float, float, float]], clock: float
) -> Iterable[tuple[float, float, float]]:
    """Begin and end of each gap before an action, and when that action's input was made."""
    for _, start, end, made in spans:
        if start > clock:
            yield clock, start, made
        clock = max(clock, end)


def _within(gaps: Iterable[tuple[float, float]], first: float, last: float) -> float:
    return sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in gaps)
