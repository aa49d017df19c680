"""Dependencies: the actions whose results an action needs before it can start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from .action import HOST_COPIES, Action, Kind, ScheduleError
from .schedule import Schedule


class Flow(NamedTuple):
    """One direction in which results pass from stage to stage: outputs forward, gradients back.

    makers: the kinds of action that make such a result; each needs the result of the stage before it in this direction.
    step: from a stage to the one that takes its result, +1 or -1.
    send, receive: the messages that carry the result where the two stages are on different devices.
    """

    makers: tuple[Kind, ...]
    step: int
    send: Kind
    receive: Kind


FLOWS = (
    Flow((Kind.F,), +1, Kind.SEND_F, Kind.RECV_F),
    Flow((Kind.I, Kind.B), -1, Kind.SEND_B, Kind.RECV_B),
)
FLOW_OF = {kind: flow for flow in FLOWS for kind in (*flow.makers, flow.send, flow.receive)}
EARLIER = {Kind.I: Kind.F, Kind.B: Kind.F, Kind.W: Kind.I}  # on the same stage, in the list of its device
# Copies between a device and its host: what makes a copy begin, and what waits for its end, the first that exists.
_COPIES = ((Kind.F, (Kind.OFFLOAD,)), (Kind.RELOAD, (Kind.B, Kind.I)))
COMPUTES = frozenset(kind for flow in FLOWS for kind in flow.makers)  # what takes a result and makes one


def source_stage(kind: Kind, stage: int, model_stages: int) -> int | None:
    """Return the stage whose result an action of this kind needs; None if it needs no other stage.

    kind: F, I, B, or a message.

    >>> source_stage(Kind.F, 2, model_stages=4), source_stage(Kind.B, 2, 4), source_stage(Kind.F, 0, 4)
    (1, 3, None)
    """
    return _beside(stage, -FLOW_OF[kind].step, model_stages)


def target_stage(kind: Kind, stage: int, model_stages: int) -> int | None:
    """Return the stage that needs the result of an action of this kind; None if no other stage does."""
    return _beside(stage, FLOW_OF[kind].step, model_stages)


def other_end(message: Action) -> Action:
    """Return the receive of a send, or the send of a receive."""
    flow = FLOW_OF[message.kind]
    if message.kind is flow.send:
        return message._replace(kind=flow.receive, stage=message.stage + flow.step)
    return message._replace(kind=flow.send, stage=message.stage - flow.step)


def _beside(stage: int, step: int, model_stages: int) -> int | None:
    return stage + step if 0 <= stage % model_stages + step < model_stages else None


_KINDS = tuple(Kind)
CODE = {kind: code for code, kind in enumerate(_KINDS)}


@dataclass(frozen=True, eq=False)
class Dependencies:
    """The actions of a schedule, numbered device after device, and the edges between them, as arrays.

    offsets: device d has the actions numbered offsets[d] to offsets[d + 1] - 1.
    code, stage, micro_batch, owner: of each leaf its kind (see CODE), stage and micro-batch (-1 for none),
        and the number of the action it belongs to; an overlapped action has two leaves, any other one.
    source, target: the edges: action `target` starts when what action `source` made has arrived.
    source_stage, target_stage: the stages at both ends of an edge; the message passes between their devices.
    is_copy: of each edge, whether it stands for a copy between a device and its host.
    """

    offsets: tuple[int, ...]
    code: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray
    owner: np.ndarray
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
        """Return for each leaf whether it is of one of these kinds."""
        return np.logical_or.reduce([self.code == CODE[kind] for kind in kinds])


def dependencies(schedule: Schedule) -> Dependencies:
    """Return the actions and edges of a schedule as arrays; linear in the number of actions.

    F waits for F of the previous stage, I and B for I or B of the next; where the schedule has sends and
    receives, the message stands between. OFFLOAD waits for the copy that begins behind F, the backward for that which
    begins with RELOAD. REDUCE_GRAD waits for the last backward of every copy of its stage.

    Raises ScheduleError when what an action waits for is missing, or comes after it on its device, or when
    an action stands on a device where its stage is not. `check` finds the rest of what can be wrong.
    """
    leaves = _Leaves(schedule)
    edges = _Edges()
    for flow in FLOWS:
        from_maker = [(maker, -flow.step) for maker in flow.makers]
        for kind in flow.makers:  # where a schedule has no receive, its device waits for the maker itself
            leaves.add_edges(kind, [(flow.receive, 0), *from_maker], edges)
        leaves.add_edges(flow.receive, [(flow.send, -flow.step)], edges)
    leaves.refuse_wrong_order()
    if schedule.replicas > 1:
        leaves.add_reductions(edges)
    messages = edges.count
    leaves.add_host_copies(edges)
    columns = edges.columns()
    is_copy = np.arange(columns[0].size) >= messages
    return Dependencies(
        leaves.offsets, leaves.code, leaves.stage, leaves.micro_batch, leaves.owner, *columns, is_copy=is_copy
    )


class _Edges:
    """Edges in the making, as four columns."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, ...]] = [(np.empty(0, dtype=np.int64),) * 4]

    def add(self, *columns: np.ndarray) -> None:
        self._parts.append(columns)

    @property
    def count(self) -> int:
        return sum(part[0].size for part in self._parts)

    def columns(self) -> list[np.ndarray]:
        return [np.concatenate(column) for column in zip(*self._parts, strict=True)]


class _Leaves:
    """The leaves of a schedule as columns, and where to find each of them."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.offsets = (0, *accumulate(map(len, schedule.actions)))
        self.code, self.stage, self.micro_batch, self.owner = _columns(schedule)
        inside = (
            (self.stage >= 0) & (self.stage < schedule.stages) & (self.micro_batch < schedule.micro_batches)
        )
        self._refuse(
            ~inside, f"lies outside {schedule.stages} stages and {schedule.micro_batches} micro-batches"
        )
        device = np.repeat(np.arange(schedule.devices), np.diff(self.offsets))[self.owner]
        at_home = np.asarray(schedule.device_of, dtype=np.int64)[self.stage] == device
        self._refuse(~at_home, "stands on another device than its stage")
        self._place = {kind: self._places(kind) for kind in {*FLOW_OF, *EARLIER, *HOST_COPIES}}

    def add_edges(self, kind: Kind, makers: Sequence[tuple[Kind, int]], edges: _Edges) -> None:
        """Add the edges into all leaves of a kind, each from the first producer that exists."""
        model_stage = self.stage % self.schedule.model_stages
        last = 0 if makers[-1][1] < 0 else self.schedule.model_stages - 1
        rows = np.flatnonzero((self.code == CODE[kind]) & (model_stage != last))
        source = np.full(rows.size, -1)
        source_stage = self.stage[rows].copy()
        for maker, step in makers:
            stage = self.stage[rows] + step
            found = self._place[maker][stage, self.micro_batch[rows]]
            new = (source < 0) & (found >= 0)
            source[new], source_stage[new] = found[new], stage[new]
        maker, step = makers[-1]
        self._refuse(
            rows[source < 0],
            f"needs {maker} of the {'next' if step > 0 else 'previous'} stage, which is missing",
        )
        edges.add(source, self.owner[rows], source_stage, self.stage[rows])

    def refuse_wrong_order(self) -> None:
        """Raise ScheduleError if a backward comes before the forward of its stage, or a W before its I."""
        for later, earlier in EARLIER.items():
            rows = np.flatnonzero(self.code == CODE[later])
            before = self._place[earlier][self.stage[rows], self.micro_batch[rows]]
            self._refuse(rows[before < 0], f"needs {earlier} of its stage, which is missing")
            self._refuse(rows[before > self.owner[rows]], f"stands before {earlier} of its stage")

    def add_reductions(self, edges: _Edges) -> None:
        """Add the edges into each REDUCE_GRAD from the last backward of every copy of its stage."""
        last = np.full(self.schedule.stages, -1)
        for kind in (Kind.B, Kind.I, Kind.W):
            rows = self.code == CODE[kind]
            np.maximum.at(last, self.stage[rows], self.owner[rows])
        apart = self.schedule.model_stages
        for row in np.flatnonzero(self.code == CODE[Kind.REDUCE_GRAD]):
            stage = self.stage[row]
            copies = np.arange(stage % apart, self.schedule.stages, apart)
            copies = copies[last[copies] >= 0]
            edges.add(
                last[copies], np.full(copies.size, self.owner[row]), copies, np.full(copies.size, stage)
            )

    def add_host_copies(self, edges: _Edges) -> None:
        """Add the edges of host copies; raise ScheduleError if a copy starts after an action that needs it."""
        for begins, waits in _COPIES:
            copies = begins if begins in HOST_COPIES else waits[0]
            rows = np.flatnonzero(self.code == CODE[copies])
            if not rows.size:
                continue
            at = self.stage[rows], self.micro_batch[rows]
            source, target = self._place[begins][at], self._place[waits[0]][at]
            for other in waits[1:]:
                target = np.where(target < 0, self._place[other][at], target)
            self._refuse(rows[(source < 0) | (target <= source)], "stands where its copy cannot")
            edges.add(source, target, at[0], at[0])

    def _places(self, kind: Kind) -> np.ndarray:
        rows = np.flatnonzero(self.code == CODE[kind])
        place = np.full((self.schedule.stages, self.schedule.micro_batches), -1)
        place[self.stage[rows], self.micro_batch[rows]] = self.owner[rows]
        return place

    def _refuse(self, rows: np.ndarray, reason: str) -> None:
        """Raise about the first of the rows, given as a mask or as numbers."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        if not rows.size:
            return
        row = rows[0]
        device = int(np.searchsorted(self.offsets, self.owner[row], side="right")) - 1
        micro_batch = int(self.micro_batch[row])
        action = Action(
            _KINDS[self.code[row]], int(self.stage[row]), None if micro_batch < 0 else micro_batch
        )
        raise ScheduleError(f"{action} on device {device} {reason}; `schedules.check` tells more")


def _columns(schedule: Schedule) -> tuple[np.ndarray, ...]:
    """Kind, stage, micro-batch and owner of each leaf, device after device."""
    leaves = [action for row in schedule.actions for action in row]
    owner = np.arange(len(leaves))
    code = _column(map(CODE.__getitem__, map(itemgetter(0), leaves)), len(leaves))
    if (code == CODE[Kind.OVERLAP_F_B]).any():
        owner = np.repeat(owner, [len(action.leaves) for action in leaves])
        leaves = [leaf for action in leaves for leaf in action.leaves]
        code = _column(map(CODE.__getitem__, map(itemgetter(0), leaves)), len(leaves))
    stage = _column(map(itemgetter(1), leaves), len(leaves))
    try:
        micro_batch = _column(map(itemgetter(2), leaves), len(leaves))
    except TypeError:  # some have none
        micro_batch = _column((-1 if leaf[2] is None else leaf[2] for leaf in leaves), len(leaves))
    return code.astype(np.int8), stage, micro_batch, owner


def _column(numbers: Iterable[Any], size: int) -> np.ndarray:
    return np.fromiter(numbers, dtype=np.int64, count=size)
