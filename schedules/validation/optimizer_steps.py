"""Checks that each optimizer step of a schedule comes where the weights may change."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from ..core.action import Action, Kind, ScheduleError
from ..core.schedule import Schedule


class Place(NamedTuple):
    """Position of an action in a schedule."""

    device: int
    position: int

    def __str__(self) -> str:
        return f"device {self.device}, position {self.position}"


def check_steps(schedule: Schedule, place: Mapping[Action, Place]) -> None:
    """Raise ScheduleError unless every optimizer step comes where the weights may change.

    A synchronous schedule steps once on every stage, or on none, when all gradients of the stage are complete.
    An asynchronous one steps at the same micro-batches on all stages, and each micro-batch uses weights that exist.

    place: where each action stands, the actions of a device in their order.

    Raises ScheduleError, naming the step and what it conflicts with.
    """
    steps = [_steps(schedule, stage) for stage in range(schedule.stages)]
    if schedule.versions:
        _check_asynchronous(schedule, steps, place)
    elif any(steps):
        last = last_backwards(place)
        example = next(step for own in steps for step in own)
        for stage, own in enumerate(steps):
            if not own:
                missing = Action(Kind.OPT_STEP, stage)
                raise ScheduleError(f"{missing} is missing, though {example} at {place[example]} is there")
            if len(own) > 1:
                raise ScheduleError(f"{own[1]} repeats {own[0]}: one optimizer step ends a synchronous step")
            if own[0].micro_batch is not None:
                raise ScheduleError(
                    f"{own[0]} at {place[own[0]]} ends a synchronous step: it names no micro-batch"
                )
            _check_last(own[0], last.get(stage), place)


def last_backwards(place: Mapping[Action, Place]) -> dict[int, Action]:
    """Return the last B or W of each stage. ``place`` has the actions of each device in order."""
    return {action.stage: action for action in place if action.kind in (Kind.B, Kind.W)}


def _check_last(step: Action, backward: Action | None, place: Mapping[Action, Place]) -> None:
    reduction = Action(Kind.REDUCE_GRAD, step.stage)
    for needed in filter(None, (backward, reduction)):
        if needed in place and place[needed] > place[step]:
            raise ScheduleError(
                f"{step} at {place[step]} changes the weights before {needed} at {place[needed]}; "
                "an asynchronous schedule says in `versions` which weights each micro-batch uses"
            )


def _check_asynchronous(schedule: Schedule, steps: list[list[Action]], place: Mapping[Action, Place]) -> None:
    """Check that micro-batches use weights that exist, that all gradients are applied, and that the stages agree."""
    if [len(row) for row in schedule.versions] != [schedule.micro_batches] * schedule.stages:
        raise ScheduleError(
            f"versions must hold {schedule.stages} rows of {schedule.micro_batches} numbers, "
            f"they hold rows of {[len(row) for row in schedule.versions]}"
        )
    for stage, own in enumerate(steps):
        _check_intervals(schedule, stage, own, steps[0])
        for before, step in pairwise([None, *own]):
            _check_applied(step, before, place)
        for micro_batch, version in enumerate(schedule.versions[stage]):
            forward = Action(Kind.F, stage, micro_batch)
            made = sum(place[step] < place[forward] for step in own)
            if not 0 <= version <= made:
                raise ScheduleError(
                    f"{forward} at {place[forward]} uses version {version}, but {made} exist by then"
                )


def _check_intervals(schedule: Schedule, stage: int, own: list[Action], first: list[Action]) -> None:
    """Check that the stage steps after equal numbers of micro-batches, as stage 0 does, and after the last."""
    numbers = [step.micro_batch for step in own]
    if numbers != [step.micro_batch for step in first]:
        others = [step.micro_batch for step in first]
        raise ScheduleError(f"stage {stage} steps after micro-batches {numbers}, but stage 0 after {others}")
    interval = numbers[0] + 1 if numbers and numbers[0] is not None else 0
    expected = list(range(interval - 1, schedule.micro_batches, interval)) if interval > 0 else []
    if not expected or numbers != expected or expected[-1] != schedule.micro_batches - 1:
        raise ScheduleError(
            f"optimizer steps of stage {stage} name the micro-batches {numbers}: they must come after "
            f"equally many micro-batches each, down to the last, {schedule.micro_batches - 1}"
        )


def _check_applied(step: Action | None, before: Action | None, place: Mapping[Action, Place]) -> None:
    """Check that every gradient since the step before is complete when a step applies it."""
    if step is None or step.micro_batch is None:
        return
    first = -1 if before is None or before.micro_batch is None else before.micro_batch
    for micro_batch in range(first + 1, step.micro_batch + 1):
        backward = Action(Kind.B, step.stage, micro_batch)
        last = backward if backward in place else backward._replace(kind=Kind.W)
        if place[last] > place[step]:
            raise ScheduleError(f"{step} at {place[step]} applies the gradient of {last} at {place[last]}")


def _steps(schedule: Schedule, stage: int) -> list[Action]:
    row = schedule.actions[schedule.device_of[stage]]
    return [action for action in row if action.kind is Kind.OPT_STEP and action.stage == stage]
