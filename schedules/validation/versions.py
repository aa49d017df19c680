"""Checks that an asynchronous schedule applies each gradient and uses weight versions that exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..core.action import Action, Kind, ScheduleError
from ..core.schedule import Schedule


class Place(NamedTuple):
    """Position of an action in a schedule."""

    device: int
    position: int

    def __str__(self) -> str:
        return f"device {self.device}, position {self.position}"


def check_versions(schedule: Schedule, place: Mapping[Action, Place]) -> None:
    """Raise ScheduleError unless all stages step at the same micro-batches, and each uses weights that exist.

    The stages step after equally many micro-batches each, down to the last one.

    Args:
        schedule: asynchronous.
        place: where each action stands.
    """
    if [len(row) for row in schedule.versions] != [schedule.micro_batches] * schedule.stages:
        raise ScheduleError(
            f"versions must hold {schedule.stages} rows of {schedule.micro_batches} numbers, "
            f"they hold rows of {[len(row) for row in schedule.versions]}"
        )
    expected = None
    for stage in range(schedule.stages):
        row = schedule.actions[schedule.device_of[stage]]
        steps = [action for action in row if action.kind is Kind.OPT_STEP and action.stage == stage]
        numbers = [step.micro_batch for step in steps]
        if expected is None:
            interval = numbers[0] + 1 if numbers and numbers[0] is not None else schedule.micro_batches
            expected = list(range(interval - 1, schedule.micro_batches, interval))
        if numbers != expected or numbers[-1] != schedule.micro_batches - 1:
            raise ScheduleError(
                f"optimizer steps of stage {stage} name the micro-batches {numbers}: they must come after "
                f"equally many micro-batches each, the same ones on all stages, down to the last, "
                f"{schedule.micro_batches - 1}"
            )
        first = 0
        for step, number in zip(steps, expected, strict=True):
            for micro_batch in range(first, number + 1):
                _check_applied(step, micro_batch, place)
            first = number + 1
        for micro_batch, version in enumerate(schedule.versions[stage]):
            forward = Action(Kind.F, stage, micro_batch)
            steps_before = sum(place[step] < place[forward] for step in steps)
            if not 0 <= version <= steps_before:
                raise ScheduleError(
                    f"{forward} at {place[forward]} uses version {version}, but {steps_before} exist by then"
                )


def _check_applied(step: Action, micro_batch: int, place: Mapping[Action, Place]) -> None:
    """Check that the gradient of a micro-batch is complete when a step applies it."""
    backward = Action(Kind.B, step.stage, micro_batch)
    last = backward if backward in place else backward._replace(kind=Kind.W)
    if place[last] > place[step]:
        raise ScheduleError(f"{step} at {place[step]} applies the gradient of {last} at {place[last]}")
