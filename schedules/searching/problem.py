"""Problem: the operations of one step as numbers, with their lengths and inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.action import Action, Kind, ScheduleError
from ..core.costs import StageCosts
from ..core.dependencies import source_stage
from ..core.schedule import Schedule
from ..simulation.event_loop import Operations
from ..transforms.passes import split_backward

F, I, W = range(3)  # noqa: E741
_KINDS = (Kind.F, Kind.I, Kind.W)
_SLACK = 1 + 1e-9

Row = list[int]


@dataclass(frozen=True)
class Problem:
    """The operations of one step on a placement, each a number: (kind * stages + stage) * micro_batches + k.

    device_of: the device of each stage.
    memory: bytes of stash per device; infinite where there is no limit.
    """

    costs: StageCosts
    devices: int
    micro_batches: int
    device_of: tuple[int, ...]
    memory: tuple[float, ...]

    @property
    def stages(self) -> int:
        """How many stages."""
        return len(self.device_of)

    @property
    def operations(self) -> int:
        """How many operations: F, I and W of every stage and micro-batch."""
        return 3 * self.stages * self.micro_batches

    def operation(self, kind: int, stage: int, micro_batch: int) -> int:
        """Return the number of an operation."""
        return (kind * self.stages + stage) * self.micro_batches + micro_batch

    @cached_property
    def stream(self) -> Row:
        """Of each operation, kind * stages + stage: within one stream the micro-batches keep their order."""
        return [stream for stream in range(3 * self.stages) for _ in range(self.micro_batches)]

    @cached_property
    def table(self) -> Operations:
        """All operations, as the event loop takes them."""
        return Operations(self.seconds, self.source, self.delay)

    @cached_property
    def seconds(self) -> list[float]:
        """Of each operation, how long it takes."""
        costs = self.costs
        per_stream = (*costs.forward, *costs.backward_input, *costs.backward_weight)
        return [seconds for seconds in per_stream for _ in range(self.micro_batches)]

    @cached_property
    def source(self) -> Row:
        """Of each operation, the one on another stage that makes its input; -1 for none."""
        return [
            -1 if source is None else self.operation(kind, source, micro_batch)
            for kind, stage in self._streams
            for source in [self._source_stage(kind, stage)]
            for micro_batch in range(self.micro_batches)
        ]

    @cached_property
    def delay(self) -> list[float]:
        """Of each operation, the seconds that its input travels."""
        hops = [self._hop(self._source_stage(kind, stage), stage) for kind, stage in self._streams]
        return [seconds for seconds in hops for _ in range(self.micro_batches)]

    @cached_property
    def taken(self) -> list[float]:
        """Of each operation, the bytes it adds to the stash when it starts (negative: releases at its end)."""
        stash, weight = self.costs.stash_bytes, self.costs.weight_stash_bytes
        per_stream = [*stash, *(w - s for s, w in zip(stash, weight, strict=True)), *(-w for w in weight)]
        return [size for size in per_stream for _ in range(self.micro_batches)]

    def fits(self, rows: Sequence[Row]) -> bool:
        """Return whether the stash stays within the memory of every device."""
        return all(
            peak <= room * _SLACK for peak, room in zip(map(self._peak, rows), self.memory, strict=True)
        )

    def in_order(self, rows: Sequence[Row]) -> bool:
        """Return whether every stage runs each kind of operation in the order of the micro-batches."""
        last: dict[int, int] = {}  # of each stream
        for operation in (operation for row in rows for operation in row):
            stream = self.stream[operation]
            if operation < last.get(stream, -1):
                return False
            last[stream] = operation
        return True

    def rows_of(self, schedule: Schedule) -> list[Row]:
        """Return the operations of a schedule, device by device, its backwards split in two."""
        kinds = {kind: number for number, kind in enumerate(_KINDS)}
        return [
            [
                self.operation(kinds[action.kind], action.stage, action.micro_batch or 0)
                for action in row
                if action.kind in kinds
            ]
            for row in split_backward(schedule).actions
        ]

    def schedule_of(self, name: str, rows: Sequence[Row]) -> Schedule:
        """Return rows of operations as a schedule."""
        return Schedule(
            name, tuple(tuple(map(self._action, row)) for row in rows), self.device_of, self.micro_batches
        )

    def _action(self, operation: int) -> Action:
        stream, micro_batch = divmod(operation, self.micro_batches)
        kind, stage = divmod(stream, self.stages)
        return Action(_KINDS[kind], stage, micro_batch)

    @property
    def _streams(self) -> list[tuple[int, int]]:
        return [(kind, stage) for kind in (F, I, W) for stage in range(self.stages)]

    def _source_stage(self, kind: int, stage: int) -> int | None:
        return None if kind == W else source_stage(_KINDS[kind], stage, self.stages)

    def _hop(self, source: int | None, target: int) -> float:
        if source is None:
            return 0.0
        devices = self.device_of[source], self.device_of[target]
        size = self.costs.message_bytes[min(source, target)]
        return self.costs.latency_between(*devices) + self.costs.occupancy_between(*devices, size)

    def _peak(self, row: Row) -> float:
        level = peak = 0.0
        for operation in row:
            level += self.taken[operation]
            peak = max(peak, level)
        return peak


def make_problem(
    costs: StageCosts,
    devices: int,
    micro_batches: int,
    memory: Sequence[float],
    device_of: Sequence[int],
) -> Problem:
    """Return the problem of these costs on a placement, no memory meaning no limit.

    Raises ScheduleError when the numbers do not go together, or one micro-batch does not fit on a device.
    """
    if devices < 1 or micro_batches < 1:
        raise ScheduleError(f"there must be a device and a micro-batch, got {devices} and {micro_batches}")
    if costs.stages != len(device_of):
        raise ScheduleError(f"the costs are for {costs.stages} stages, the placement for {len(device_of)}")
    if set(device_of) != set(range(devices)):
        raise ScheduleError(
            f"the placement {tuple(device_of)} must use each of the devices 0 to {devices - 1}"
        )
    room = tuple(map(float, memory)) if len(memory) else (float("inf"),) * devices
    if len(room) != devices:
        raise ScheduleError(f"memory has {len(room)} numbers for {devices} devices; give one a device")
    for device, has in enumerate(room):
        if not has >= 0:
            raise ScheduleError(f"memory of device {device} is {has}; bytes are a number of 0 or more")
        needed = sum(size for size, home in zip(costs.stash_bytes, device_of, strict=True) if home == device)
        if needed > has * _SLACK:
            raise ScheduleError(
                f"device {device} has room for {has:g} bytes of stash, one micro-batch needs {needed:g}; "
                "cut smaller micro-batches, recompute, or move layers"
            )
    return Problem(costs, devices, micro_batches, tuple(device_of), room)
