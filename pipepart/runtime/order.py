"""The order of each worker's actions in a step, in its forwards only, or in its backwards only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import schedules
from schedules import Kind, Schedule

from ..planning import Plan

_MOST = 32  # size of the cache, by number of micro-batches: small mini-batches have fewer
_COMMUNICATION = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
_FORWARDS = frozenset({Kind.F})
_BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE, Kind.REDUCE_GRAD})


@dataclass(frozen=True)
class Order:
    """The actions of each worker; overlapped pairs run one after the other.

    Attributes:
        schedule: the actions.
        repeated: the (stage, micro-batch) pairs whose forward is recomputed, in this order or in a later one.
    """

    schedule: Schedule
    repeated: frozenset[tuple[int, int]] = frozenset()


class Orders:
    """The orders that follow from a plan's schedule, each built once.

    Args:
        plan: has the schedule.
        with_optimizers: whether each stage's optimizer steps within the step. Asynchronous schedules contain these
            actions already.
    """

    def __init__(self, plan: Plan, with_optimizers: bool = False) -> None:
        self._plan = plan
        self._with_optimizers = with_optimizers
        self._steps: dict[int, Order] = {}
        self._parts: dict[tuple[int, frozenset[Kind]], Order] = {}

    def step(self, micro_batches: int) -> Order:
        """Return the order of a whole step, for any number of micro-batches up to the plan's."""
        if micro_batches not in self._steps:
            schedule = self._plan.build_schedule(micro_batches)
            if self._with_optimizers and not schedule.versions:
                schedule = schedules.insert_optimizer_step(schedule)
            schedules.check(schedule)
            schedule = _without_communication(schedule)
            if len(self._steps) >= _MOST:
                self._steps.clear()
                self._parts.clear()
            actions = (action for row in schedule.actions for action in row)
            repeated = [(a.stage, a.micro_batch or 0) for a in actions if a.kind is Kind.RECOMPUTE]
            self._steps[micro_batches] = Order(schedules.split_overlaps(schedule), frozenset(repeated))
        return self._steps[micro_batches]

    def forwards(self, micro_batches: int) -> Order:
        """Return the forwards of a step, in its order."""
        return self._part(micro_batches, _FORWARDS)

    def backwards(self, micro_batches: int) -> Order:
        """Return the backwards of a step, in its order."""
        return self._part(micro_batches, _BACKWARDS)

    def _part(self, micro_batches: int, kinds: frozenset[Kind]) -> Order:
        key = micro_batches, kinds
        if key not in self._parts:
            whole = self.step(micro_batches)
            rows = tuple(tuple(a for a in row if a.kind in kinds) for row in whole.schedule.actions)
            self._parts[key] = replace(whole, schedule=replace(whole.schedule, actions=rows))
        return self._parts[key]


def _without_communication(schedule: Schedule) -> Schedule:
    """Remove sends and receives: the transport sends messages when they are made and receives them when needed."""
    rows = tuple(tuple(a for a in row if a.kind not in _COMMUNICATION) for row in schedule.actions)
    return schedule if rows == schedule.actions else replace(schedule, actions=rows)
