"""Hanayo's wave placement, with the order of a greedy list scheduler."""

from __future__ import annotations

import heapq

from ..core.action import Action, Kind, ScheduleError, forward
from ..core.placement import wave
from ..core.schedule import Schedule

_FORWARD_SLOTS, _BACKWARD_SLOTS = 1, 2  # assumed lengths


def hanayo(devices: int, micro_batches: int, waves: int = 1, chunks: int | None = None) -> Schedule:
    """2 * waves stages per device, placed in waves: 0, 1, 2, 3, 3, 2, 1, 0, 0, 1, ...

    The placement is the paper's. The paper shows its order for as many micro-batches as devices; here a list scheduler
    makes the order for any number, with the paper's bubble in that case. A free device runs an action that is ready: a
    backward before a forward, then the earliest micro-batch, then the latest stage. Backwards are assumed to last twice
    as long as forwards. Each further wave shortens the bubble and adds messages. All micro-batches may be in flight.

    chunks: stages per device, twice the number of waves; used instead of `waves`.

    Raises:
        ScheduleError: chunks is odd: a wave runs there and back.

    Source: Liu et al. 2023, Hanayo, arXiv 2308.15762, §3.2 and §3.3 (wave-like placement, action lists).
    """
    chunks = 2 * waves if chunks is None else chunks
    if chunks < 2 or chunks % 2:
        nearest = f"{chunks - 1} or {chunks + 1}" if chunks > 2 else "2"
        raise ScheduleError(
            f"hanayo needs an even number of chunks per device, got {chunks}; {nearest} would do"
        )
    device_of = wave(devices, chunks)
    rows: list[list[Action]] = [[] for _ in range(devices)]
    ready: list[list[tuple[tuple[bool, int, int], Action]]] = [[] for _ in range(devices)]
    ends: list[tuple[int, int, Action]] = []  # (slot, device, what ends then on it)
    idle = set(range(devices))
    ready[0] = [_ranked(forward(0, k)) for k in range(micro_batches)]
    slot = 0
    while True:
        for device in sorted(idle):
            if ready[device]:
                idle.remove(device)
                _, action = heapq.heappop(ready[device])
                rows[device].append(action)
                length = _FORWARD_SLOTS if action.kind is Kind.F else _BACKWARD_SLOTS
                heapq.heappush(ends, (slot + length, device, action))
        if not ends:
            return Schedule("hanayo", tuple(map(tuple, rows)), device_of, micro_batches)
        slot = ends[0][0]
        while ends and ends[0][0] == slot:
            _, device, ended = heapq.heappop(ends)
            idle.add(device)
            for following in _following(ended, len(device_of)):
                heapq.heappush(ready[device_of[following.stage]], _ranked(following))


def _following(action: Action, stages: int) -> list[Action]:
    """Return what the end of an action makes ready: the same on the next stage, or the backward behind the last."""
    target = action.stage + (1 if action.kind is Kind.F else -1)
    if 0 <= target < stages:
        return [action._replace(stage=target)]
    return [action._replace(kind=Kind.B)] if action.kind is Kind.F else []


def _ranked(action: Action) -> tuple[tuple[bool, int, int], Action]:
    """The action behind its rank: the lowest goes first."""
    return (action.kind is Kind.F, action.micro_batch or 0, -action.stage), action
