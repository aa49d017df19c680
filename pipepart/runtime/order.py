"""The order of each worker's actions in a step, in its forwards only, or in its backwards only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import schedules
from schedules import Kind, Schedule

from ..planning import Plan

_FORWARDS = frozenset({Kind.F, Kind.OFFLOAD})
_BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE, Kind.RELOAD, Kind.REDUCE_GRAD})
# All but sends and receives: the transport sends messages when they are made and receives them when they are needed.
_STEP = _FORWARDS | _BACKWARDS | {Kind.OPT_STEP}


@dataclass(frozen=True)
class Order:
    """The actions of each worker; overlapped pairs run one after the other.

    Attributes:
        schedule: the actions.
        repeated: by stage, the micro-batches whose forward is recomputed, in this order or in a later one.
        offloaded: by stage, the micro-batches whose stash is copied to the host and back.
    """

    schedule: Schedule
    repeated: Mapping[int, frozenset[int]]
    offloaded: Mapping[int, frozenset[int]]

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of actions that occur."""
        return frozenset(action.kind for row in self.schedule.actions for action in row)


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
        self._built: dict[int, tuple[Order, Order, Order]] = {}

    def step(self, micro_batches: int) -> Order:
        """Return the order of a whole step, for any number of micro-batches up to the plan's."""
        return self._of(micro_batches)[0]

    def forwards(self, micro_batches: int) -> Order:
        """Return the forwards of a step, in its order."""
        return self._of(micro_batches)[1]

    def backwards(self, micro_batches: int) -> Order:
        """Return the backwards of a step, in its order."""
        return self._of(micro_batches)[2]

    def _of(self, micro_batches: int) -> tuple[Order, Order, Order]:
        if micro_batches not in self._built:
            schedule = self._plan.build_schedule(micro_batches)
            if self._with_optimizers and not schedule.versions:
                schedule = schedules.insert_optimizer_step(schedule)
            schedules.check(schedule)
            schedule = _only(schedules.split_overlaps(schedule), _STEP)
            whole = Order(
                schedule, _micro_batches(schedule, Kind.RECOMPUTE), _micro_batches(schedule, Kind.OFFLOAD)
            )
            forwards, backwards = _only(schedule, _FORWARDS), _only(schedule, _BACKWARDS)
            self._built[micro_batches] = (
                whole,
                replace(whole, schedule=forwards),
                replace(whole, schedule=backwards),
            )
        return self._built[micro_batches]


def _micro_batches(schedule: Schedule, kind: Kind) -> Mapping[int, frozenset[int]]:
    """Return by stage the micro-batches that have an action of a kind."""
    pairs = [(a.stage, a.micro_batch) for row in schedule.actions for a in row if a.kind is kind]
    return {
        stage: frozenset(part for of_stage, part in pairs if of_stage == stage and part is not None)
        for stage in range(schedule.stages)
    }


def _only(schedule: Schedule, kinds: frozenset[Kind]) -> Schedule:
    rows = tuple(tuple(action for action in row if action.kind in kinds) for row in schedule.actions)
    return schedule if rows == schedule.actions else replace(schedule, actions=rows)
