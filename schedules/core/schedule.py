"""Schedule: for each device, the ordered list of actions of one step; CSV and JSON forms."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .action import Action, ScheduleError

# What torch adds to its tables: gathering and freeing of weights, and messages, which follow from the other actions.
_ADDED_BY_TORCH = re.compile(r"[0-9]+(UNSHARD|RESHARD|(SEND|RECV)_[FB][0-9]+)")


@dataclass(frozen=True, repr=False)
class Schedule:
    """For each device, the ordered list of actions of one step.

    A schedule fixes only the order; `simulate` computes times. Stages are numbered along the model. A schedule of
    several `replicas` runs copies of the model: stage s of copy k has the number k * model_stages + s, and each
    micro-batch runs through one copy.

    Args:
        name: what it was built as.
        actions: one tuple of actions per device.
        device_of: the device of each stage.
        micro_batches: how many micro-batches one step has.
        replicas: how many copies of the model it runs.
        versions: of an asynchronous schedule, versions[stage][micro_batch] is the number of optimizer steps in the
            weights that this micro-batch uses on that stage; empty when the schedule is synchronous.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    device_of: tuple[int, ...]
    micro_batches: int
    replicas: int = 1
    versions: tuple[tuple[int, ...], ...] = ()

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages in all copies of the model together."""
        return len(self.device_of)

    @property
    def model_stages(self) -> int:
        """Number of stages in one copy of the model."""
        return self.stages // self.replicas

    @cached_property
    def leaves(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each device, with each overlapped pair as a forward and then a backward."""
        if not any(action.parts for row in self.actions for action in row):
            return self.actions
        return tuple(tuple(leaf for action in row for leaf in action.leaves) for row in self.actions)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Return the stages on a device, in ascending order."""
        return self._stages_by_device.get(device, ())

    @cached_property
    def _stages_by_device(self) -> dict[int, tuple[int, ...]]:
        stages: dict[int, list[int]] = {}
        for stage, device in enumerate(self.device_of):
            stages.setdefault(device, []).append(stage)
        return {device: tuple(stages_here) for device, stages_here in stages.items()}

    def previous_stage(self, stage: int) -> int | None:
        """Return the stage whose output feeds `stage`; None for the first stage of the model."""
        return stage - 1 if stage % self.model_stages else None

    def next_stage(self, stage: int) -> int | None:
        """Return the stage that `stage` feeds; None for the last stage of the model."""
        return stage + 1 if (stage + 1) % self.model_stages else None

    @property
    def sizes(self) -> str:
        """Text for messages with the numbers of stages, devices and micro-batches."""
        numbers = (
            (self.stages, "stage", "s"),
            (self.devices, "device", "s"),
            (self.micro_batches, "micro-batch", "es"),
        )
        stages, devices, parts = (
            f"{count} {word}{'' if count == 1 else end}" for count, word, end in numbers
        )
        return f"{stages} on {devices}, {parts}"

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: {self.sizes}>"

    def to_csv(self) -> str:
        """Return the actions as CSV, one row per device, in the format of torch.distributed.pipelining."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([map(str, row) for row in self.actions])
        return text.getvalue()

    @staticmethod
    def from_csv(text: str, name: str = "csv", replicas: int = 1) -> Schedule:
        """Read a schedule from CSV with one row of actions per device.

        Empty cells and blank lines at the end are skipped. So are cells of torch's tables that send and receive, or
        gather and free the weights of FSDP: they follow from the order of the other actions. The placement and the
        number of micro-batches are read off the actions; CSV keeps no name and no versions.

        Raises:
            ScheduleError: a cell is no action, or a stage is on no device or on two.
        """
        rows = [list(filter(None, map(str.strip, row))) for row in csv.reader(io.StringIO(text))]
        while rows and not rows[-1]:  # blank lines at the end are no devices
            rows.pop()
        actions = tuple(
            _parse_row(device, [cell for cell in row if not _ADDED_BY_TORCH.fullmatch(cell)])
            for device, row in enumerate(rows)
        )
        leaves = [leaf for row in actions for action in row for leaf in action.leaves]
        micro_batches = 1 + max((leaf.micro_batch or 0 for leaf in leaves), default=-1)
        return Schedule(name, actions, _placement(actions), micro_batches, replicas)

    def to_json(self) -> str:
        """Return the schedule as JSON text, with all its fields."""
        return json.dumps(
            {
                "version": 1,
                "name": self.name,
                "micro_batches": self.micro_batches,
                "device_of": self.device_of,
                "replicas": self.replicas,
                "versions": self.versions,
                "actions": [[str(action) for action in row] for row in self.actions],
            }
        )

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Read a schedule written by `to_json`.

        Raises:
            ScheduleError: the text is no JSON, a field is missing, unknown or of another type, or a cell is no action.
        """
        from .schedule_file import read_fields  # pydantic, which takes long to import

        read = read_fields(text)
        return Schedule(
            name=read.name,
            actions=tuple(_parse_row(device, row) for device, row in enumerate(read.actions)),
            device_of=read.device_of,
            micro_batches=read.micro_batches,
            replicas=read.replicas,
            versions=read.versions,
        )


def without_micro_batches(schedule: Schedule, first_surplus: int) -> Schedule:
    """Return the schedule without the micro-batches from `first_surplus` on; a legal schedule stays legal."""
    rows = tuple(
        tuple(kept for action in row if (kept := _without(action, first_surplus)) is not None)
        for row in schedule.actions
    )
    return replace(schedule, actions=rows, micro_batches=min(first_surplus, schedule.micro_batches))


def _without(action: Action, first_surplus: int) -> Action | None:
    kept = [leaf for leaf in action.leaves if leaf.micro_batch is None or leaf.micro_batch < first_surplus]
    if len(kept) == len(action.leaves):
        return action
    return kept[0] if kept else None


def _parse_row(device: int, cells: Iterable[str]) -> tuple[Action, ...]:
    try:
        return tuple(map(Action.parse, cells))
    except ScheduleError as error:
        raise ScheduleError(f"device {device}: {error}") from None


def _placement(actions: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The device on which each stage's actions stand."""
    home: dict[int, int] = {}
    for device, row in enumerate(actions):
        for leaf in (leaf for action in row for leaf in action.leaves):
            if home.setdefault(leaf.stage, device) != device:
                raise ScheduleError(
                    f"{leaf} stands on device {device}, "
                    f"but stage {leaf.stage} is on device {home[leaf.stage]}"
                )
    missing = sorted(set(range(max(home, default=-1) + 1)) - home.keys())
    if missing:
        raise ScheduleError(f"no device has an action of stage {missing[0]}, though stage {max(home)} exists")
    return tuple(home[stage] for stage in range(len(home)))
