"""Dependencies: the actions whose results an action needs before it can start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter

import numpy as np

from .action import BACKWARDS, HOST_COPIES, Action, Kind, ScheduleError
from .schedule import Schedule

EARLIER = {Kind.I: Kind.F, Kind.B: Kind.F, Kind.W: Kind.I}  # on the same stage, in the list of its device
_KINDS = tuple(Kind)
CODE = {kind: code for code, kind in enumerate(_KINDS)}
_Edges = list[tuple[np.ndarray, ...]]  # parts of the columns source, target, source_stage, target_stage


@dataclass(frozen=True, eq=False)
class Dependencies:
    """The actions of a schedule, numbered device after device, and the edges between them, as arrays.

    An overlapped pair counts as two actions, its forward and then its backward.

    offsets: device d has the actions numbered offsets[d] to offsets[d + 1] - 1.
    code, stage, micro_batch: of each action its kind (see CODE), stage and micro-batch (-1 for none).
    source, target: the edges: action `target` starts when what action `source` made has arrived.
    source_stage, target_stage: the stages at both ends of an edge; the message passes between their devices.
    is_copy: of each edge, whether it stands for a copy between a device and its host.
    """

    offsets: tuple[int, ...]
    code: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray
    source: np.ndarray
    target: np.ndarray
    source_stage: np.ndarray
    target_stage: np.ndarray
    is_copy: np.ndarray

    @property
    def actions(self) -> int:
        """Number of actions."""
        return self.offsets[-1]

    def is_kind(self, *kinds: Kind) -> np.ndarray:
        """Return for each action whether it is of one of these kinds."""
        return np.logical_or.reduce([self.code == CODE[kind] for kind in kinds])


def dependencies(schedule: Schedule, skips: Sequence[tuple[int, int]] = ()) -> Dependencies:
    """Return the actions and edges of a schedule as arrays; linear in the number of actions.

    F waits for F of the previous stage, I and B for I or B of the next. OFFLOAD waits for the copy that begins behind
    F, the backward for that which begins with RELOAD. With several copies of the model, REDUCE_GRAD waits for the last
    backward of every copy of its stage.

    Args:
        schedule: the actions.
        skips: (source, target) of messages that go past stages, as stages of one copy of the model. Their gradients go
            back. Of the edges from one action, that to the nearest stage comes first.

    Raises ScheduleError when what an action waits for is missing, or comes after it on its device, or when
    an action stands on a device where its stage is not. `check` finds the rest of what can be wrong.
    """
    actions = _Actions(schedule)
    actions.refuse_wrong_order()
    edges: _Edges = [(np.empty(0, dtype=np.int64),) * 4]
    actions.add_messages(edges, skips)
    if schedule.replicas > 1:
        actions.add_reductions(edges)
    messages = sum(part[0].size for part in edges)
    actions.add_host_copies(edges)
    columns = [np.concatenate(column) for column in zip(*edges, strict=True)]
    is_copy = np.arange(columns[0].size) >= messages
    return Dependencies(
        actions.offsets, actions.code, actions.stage, actions.micro_batch, *columns, is_copy=is_copy
    )


class _Actions:
    """The actions of a schedule as columns, and where to find each of them."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.offsets = (0, *accumulate(map(len, schedule.leaves)))
        self.code, self.stage, self.micro_batch = _columns(schedule)
        inside = (
            (self.stage >= 0) & (self.stage < schedule.stages) & (self.micro_batch < schedule.micro_batches)
        )
        self._refuse(
            ~inside, f"lies outside {schedule.stages} stages and {schedule.micro_batches} micro-batches"
        )
        device = np.repeat(np.arange(schedule.devices), np.diff(self.offsets))
        at_home = np.asarray(schedule.device_of, dtype=np.int64)[self.stage] == device
        self._refuse(~at_home, "stands on another device than its stage")
        self._place = {kind: self._places(kind) for kind in (Kind.F, *BACKWARDS, *HOST_COPIES)}
        self._backward = np.maximum(self._place[Kind.I], self._place[Kind.B])

    def add_messages(self, edges: _Edges, skips: Sequence[tuple[int, int]]) -> None:
        """Add the edges between stages: outputs forward, gradients back."""
        apart = self.schedule.model_stages
        model_stage = self.stage % apart if apart else self.stage
        for kind, place, step, end in (
            (Kind.F, self._place[Kind.F], -1, 0),
            (Kind.I, self._backward, 1, apart - 1),
            (Kind.B, self._backward, 1, apart - 1),
        ):
            rows = np.flatnonzero((self.code == CODE[kind]) & (model_stage != end))
            stage = self.stage[rows] + step
            source = place[stage, self.micro_batch[rows]]
            neighbour = "F of the previous" if kind is Kind.F else "I or B of the next"
            self._refuse(rows[source < 0], f"needs {neighbour} stage, which is missing")
            edges.append((source, rows, stage, self.stage[rows]))
        for first in range(0, self.schedule.stages, apart or 1):
            for source, target in sorted(skips, key=lambda skip: skip[1] - skip[0]):
                self._add_skip(edges, self._place[Kind.F], first + source, first + target)
                self._add_skip(edges, self._backward, first + target, first + source)

    def _add_skip(self, edges: _Edges, place: np.ndarray, source: int, target: int) -> None:
        both = (place[source] >= 0) & (place[target] >= 0)
        stages = np.full((2, int(both.sum())), [[source], [target]])
        edges.append((place[source][both], place[target][both], *stages))

    def refuse_wrong_order(self) -> None:
        """Raise ScheduleError if a backward comes before the forward of its stage, or a W before its I."""
        for later, earlier in EARLIER.items():
            rows = np.flatnonzero(self.code == CODE[later])
            before = self._place[earlier][self.stage[rows], self.micro_batch[rows]]
            self._refuse(rows[before < 0], f"needs {earlier} of its stage, which is missing")
            self._refuse(rows[before > rows], f"stands before {earlier} of its stage")

    def add_reductions(self, edges: _Edges) -> None:
        """Add the edges into each REDUCE_GRAD from the last backward of every copy of its stage."""
        last = np.full(self.schedule.stages, -1)
        for kind in BACKWARDS:
            rows = np.flatnonzero(self.code == CODE[kind])
            np.maximum.at(last, self.stage[rows], rows)
        apart = self.schedule.model_stages
        for row in np.flatnonzero(self.code == CODE[Kind.REDUCE_GRAD]):
            stage = self.stage[row]
            copies = np.arange(stage % apart, self.schedule.stages, apart)
            copies = copies[last[copies] >= 0]
            edges.append((last[copies], np.full(copies.size, row), copies, np.full(copies.size, stage)))

    def add_host_copies(self, edges: _Edges) -> None:
        """Add the edges of host copies; raise ScheduleError if a copy starts after an action that needs it."""
        for kind in (Kind.OFFLOAD, Kind.RELOAD):
            rows = np.flatnonzero(self.code == CODE[kind])
            if not rows.size:
                continue
            at = self.stage[rows], self.micro_batch[rows]
            source, target = (
                (self._place[Kind.F][at], rows) if kind is Kind.OFFLOAD else (rows, self._backward[at])
            )
            self._refuse(rows[(source < 0) | (target <= source)], "stands where its copy cannot")
            edges.append((source, target, at[0], at[0]))

    def _places(self, kind: Kind) -> np.ndarray:
        rows = np.flatnonzero(self.code == CODE[kind])
        place = np.full((self.schedule.stages, self.schedule.micro_batches), -1)
        place[self.stage[rows], self.micro_batch[rows]] = rows
        return place

    def _refuse(self, rows: np.ndarray, reason: str) -> None:
        """Raise about the first of the rows, given as a mask or as numbers."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        if not rows.size:
            return
        row = rows[0]
        device = int(np.searchsorted(self.offsets, row, side="right")) - 1
        micro_batch = int(self.micro_batch[row])
        action = Action(
            _KINDS[self.code[row]], int(self.stage[row]), None if micro_batch < 0 else micro_batch
        )
        raise ScheduleError(f"{action} on device {device} {reason}; `schedules.check` tells more")


def _columns(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kind, stage and micro-batch of each action, device after device."""
    actions = list(chain.from_iterable(schedule.leaves))
    code = np.fromiter(map(CODE.__getitem__, map(itemgetter(0), actions)), np.int8, len(actions))
    stage = np.fromiter(map(itemgetter(1), actions), np.int64, len(actions))
    try:
        micro_batch = np.fromiter(map(itemgetter(2), actions), np.int64, len(actions))
    except TypeError:  # some have none
        numbers = (-1 if action[2] is None else action[2] for action in actions)
        micro_batch = np.fromiter(numbers, np.int64, len(actions))
    return code, stage, micro_batch
