"""Problem: all operations of one step on a fixed placement, as integers, with their seconds, inputs and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from ..core.action import Action, Kind, ScheduleError
from ..core.costs import StageCosts
from ..core.schedule import Schedule
from ..transforms.passes import split_backward

F, I, W = range(3)  # noqa: E741
_KINDS = (Kind.F, Kind.I, Kind.W)
SLACK = 1 + 1e-9

Row = list[int]
_Number = TypeVar("_Number", int, float)
Floats = Sequence[float]


@dataclass(frozen=True)
class Memory:
    """Memory limits of the devices, and the bytes of one micro-batch on each stage.

    Attributes:
        limit: [devices]: bytes for everything below; infinite for no limit.
        stash: [stages]: bytes held from F to the end of I.
        deferred: [stages]: bytes held from the end of I to the end of W.
        boundary: [stages]: bytes held instead of the stash for a micro-batch that is recomputed.
        copied: [stages]: extra bytes while stashes are copied to the host and back.
        inputs, gradients: [stages]: bytes of the input, and of the gradient of the output, while they wait on the
            device; 0 if they come from a stage of the same device.
        workspace: [stages][3]: extra bytes while F, I and W run; a whole backward counts as I.
    """

    limit: Floats
    stash: Floats
    deferred: Floats
    boundary: Floats
    copied: Floats
    inputs: Floats
    gradients: Floats
    workspace: Sequence[Floats]


@dataclass(frozen=True)
class Problem:
    """The operations of one step on a placement. Operation number: (kind * stages + stage) * micro_batches + k.

    Attributes:
        devices, micro_batches: number of devices and of micro-batches.
        device_of: [stages]: device of each stage.
        forward, backward_input, backward_weight: [stages]: seconds for which F, I and W keep the device busy.
        whole: [stages]: True if W follows I at once, as one full backward. I then has the seconds of both.
        recompute: [stages]: seconds of the repeated forward, right before an I.
        recomputed: [stages]: number of micro-batches that are recomputed, counted from micro-batch 0.
        delay_forward, delay_backward: [stages]: transfer seconds of the input of F, and of the gradient for I.
        hold_forward, hold_backward: [stages]: the part of these seconds for which the message occupies the link. A link
            between two devices carries one message at a time in each direction.
        memory: memory limits and bytes; None for no limit.
        scale: [micro-batches]: seconds relative to the mean; empty if all micro-batches have the same size.
    """

    devices: int
    micro_batches: int
    device_of: tuple[int, ...]
    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    whole: Sequence[bool]
    recompute: Floats
    recomputed: Sequence[int]
    delay_forward: Floats
    delay_backward: Floats
    hold_forward: Floats
    hold_backward: Floats
    memory: Memory | None = None
    scale: Floats = ()

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.device_of)

    @property
    def operations(self) -> int:
        """The number of operations: F, I and W of every stage and micro-batch."""
        return 3 * self.stages * self.micro_batches

    def operation(self, kind: int, stage: int, micro_batch: int) -> int:
        """Return the number of an operation."""
        return (kind * self.stages + stage) * self.micro_batches + micro_batch

    @cached_property
    def stream(self) -> Row:
        """[operations]: kind * stages + stage. Within a stream the micro-batches keep their order."""
        return self._each(range(3 * self.stages))

    @cached_property
    def seconds(self) -> list[float]:
        """[operations]: seconds, without recomputes."""
        per_stream = (*self.forward, *self.backward_input, *self.backward_weight)
        if not self.scale:
            return self._each(per_stream)
        return [value * factor for value in per_stream for factor in self.scale]

    @cached_property
    def recompute_before(self) -> list[float]:
        """[F and I]: seconds of the recompute before the operation; empty if no stage recomputes."""
        if not any(self.recomputed):
            return []
        zeros = [0.0] * (self.stages * self.micro_batches)
        scale = self.scale or [1.0] * self.micro_batches
        return zeros + [
            seconds * factor * (k < count)
            for seconds, count in zip(self.recompute, self.recomputed, strict=True)
            for k, factor in enumerate(scale)
        ]

    @cached_property
    def source(self) -> Row:
        """[operations]: the operation of another stage whose result it needs; negative for none."""
        m, stride = self.micro_batches, self.stages * self.micro_batches
        return [*range(-m, stride - m), *range(stride + m, 2 * stride), *[-1] * (m + stride)]

    @cached_property
    def delay(self) -> list[float]:
        """[operations]: seconds until the result that it needs is on its device."""
        return self._each((*self.delay_forward, *self.delay_backward, *[0.0] * self.stages))

    @cached_property
    def even(self) -> Problem:
        """The problem with a second for each F, I and W, and no time for messages, recomputes and copies."""
        zeros = [0.0] * self.stages
        return replace(
            self,
            forward=[1.0] * self.stages,
            backward_input=[2.0 if whole else 1.0 for whole in self.whole],
            backward_weight=[0.0 if whole else 1.0 for whole in self.whole],
            recompute=zeros,
            delay_forward=zeros,
            delay_backward=zeros,
            hold_forward=zeros,
            hold_backward=zeros,
            scale=(),
        )

    @cached_property
    def stash(self) -> list[float]:
        """[F]: bytes that a micro-batch keeps from its F to its I.

        If I leaves more bytes for W than the stash has, those bytes count from the F on.
        """
        assert self.memory is not None
        return [
            max(boundary if k < count else stash, 0.0 if whole else deferred)
            for stash, boundary, deferred, count, whole in zip(
                self.memory.stash,
                self.memory.boundary,
                self.memory.deferred,
                self.recomputed,
                self.whole,
                strict=True,
            )
            for k in range(self.micro_batches)
        ]

    @cached_property
    def deferred(self) -> list[float]:
        """[stages]: bytes that a micro-batch keeps from its I to its W."""
        assert self.memory is not None
        return [0.0 if whole else size for whole, size in zip(self.whole, self.memory.deferred, strict=True)]

    @cached_property
    def passing(self) -> list[float]:
        """[devices]: largest transient bytes: workspace, and full stashes while they are recomputed or copied."""
        assert self.memory is not None
        most = [0.0] * self.devices
        for stage, (device, copied) in enumerate(zip(self.device_of, self.memory.copied, strict=True)):
            if self.recomputed[stage]:
                copied = self.memory.stash[stage] - self.stash[stage * self.micro_batches]
            most[device] = max(most[device], copied + max(self.memory.workspace[stage]))
        return most

    @cached_property
    def needed(self) -> list[float]:
        """[stages]: bytes that must be free before an F: its stash, and the stashes of the device's later stages.

        This rule lets the oldest micro-batch always proceed.
        """
        needed, later, m = [0.0] * self.stages, [0.0] * self.devices, self.micro_batches
        for stage in reversed(range(self.stages)):
            device = self.device_of[stage]
            later[device] += max(self.stash[stage * m], self.stash[stage * m + m - 1])
            needed[stage] = later[device]
        return needed

    @cached_property
    def taken(self) -> list[float]:
        """[operations]: bytes added to the stashes at the start (if negative: freed at the end); zeros for no limit."""
        if self.memory is None:
            return [0.0] * self.operations
        deferred = self._each(self.deferred)
        left = [after - before for after, before in zip(deferred, self.stash, strict=True)]
        return [*self.stash, *left, *(-size for size in deferred)]

    @property
    def has_room(self) -> bool:
        """True if the stashes of one micro-batch fit on every device."""
        return self.memory is None or all(
            size <= self.memory.limit[device] * SLACK
            for size, device in zip(self.needed, self.device_of, strict=True)
        )

    def in_order(self, rows: Sequence[Row]) -> bool:
        """Return True if every stage runs each kind of operation in the order of the micro-batches."""
        last: dict[int, int] = {}  # of each stream
        for operation in (operation for row in rows for operation in row):
            stream = self.stream[operation]
            if operation < last.get(stream, -1):
                return False
            last[stream] = operation
        return True

    def rows_of(self, schedule: Schedule) -> list[Row]:
        """Return the operations of each device in a schedule, with every backward split into I and W."""
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
        """Convert rows of operations to a schedule. Devices without operations are removed."""
        used = [device for device, row in enumerate(rows) if row]
        place = {device: at for at, device in enumerate(used)}
        actions = tuple(tuple(self._actions(rows[device])) for device in used)
        device_of = tuple(place[device] for device in self.device_of)
        return Schedule(name, actions, device_of, self.micro_batches)

    def _actions(self, row: Row) -> list[Action]:
        actions = []
        for operation in row:
            stream, micro_batch = divmod(operation, self.micro_batches)
            kind, stage = divmod(stream, self.stages)
            if self.whole[stage] and kind != F:
                if kind == I:
                    actions.append(Action(Kind.B, stage, micro_batch))
            else:
                actions.append(Action(_KINDS[kind], stage, micro_batch))
        return actions

    def _each(self, per_stream: Sequence[_Number]) -> list[_Number]:
        return [value for value in per_stream for _ in range(self.micro_batches)]


def make_problem(
    costs: StageCosts,
    devices: int,
    micro_batches: int,
    memory: Sequence[float],
    device_of: Sequence[int],
) -> Problem:
    """Return the problem for these costs on a placement, with split backwards; empty ``memory`` means no limit.

    Raises:
        ScheduleError: the numbers contradict each other, or one micro-batch does not fit on a device.
    """
    if devices < 1 or micro_batches < 1:
        raise ScheduleError(f"there must be a device and a micro-batch, got {devices} and {micro_batches}")
    if costs.stages != len(device_of):
        raise ScheduleError(f"the costs are for {costs.stages} stages, the placement for {len(device_of)}")
    if set(device_of) != set(range(devices)):
        raise ScheduleError(
            f"the placement {tuple(device_of)} must use each of the devices 0 to {devices - 1}"
        )
    limits = tuple(map(float, memory)) if len(memory) else (float("inf"),) * devices
    if len(limits) != devices:
        raise ScheduleError(f"memory has {len(limits)} numbers for {devices} devices; give one a device")
    for device, limit in enumerate(limits):
        if not limit >= 0:
            raise ScheduleError(f"memory of device {device} is {limit}; bytes are a number of 0 or more")
        needed = sum(size for size, home in zip(costs.stash_bytes, device_of, strict=True) if home == device)
        if needed > limit * SLACK:
            raise ScheduleError(
                f"device {device} has room for {limit:g} bytes of stash, one micro-batch needs {needed:g}; "
                "cut smaller micro-batches, recompute, or move layers"
            )
    stages, zeros = costs.stages, [0.0] * costs.stages
    limited = min(limits) < float("inf")
    sizes = costs.stash_bytes, costs.weight_stash_bytes
    memory_of_stages = Memory(limits, *sizes, zeros, zeros, zeros, zeros, [(0.0,) * 3] * stages)
    return Problem(
        devices=devices,
        micro_batches=micro_batches,
        device_of=tuple(device_of),
        forward=costs.forward,
        backward_input=costs.backward_input,
        backward_weight=costs.backward_weight,
        whole=[False] * stages,
        recompute=zeros,
        recomputed=[0] * stages,
        delay_forward=[0.0, *(_hop(costs, device_of, stage - 1, stage) for stage in range(1, stages))],
        delay_backward=[*(_hop(costs, device_of, stage + 1, stage) for stage in range(stages - 1)), 0.0],
        hold_forward=zeros,
        hold_backward=zeros,
        memory=memory_of_stages if limited else None,
    )


def _hop(costs: StageCosts, device_of: Sequence[int], source: int, target: int) -> float:
    devices = device_of[source], device_of[target]
    size = costs.message_bytes[min(source, target)]
    return costs.latency_between(*devices) + costs.occupancy_between(*devices, size)
