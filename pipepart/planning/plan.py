"""Plan: which layers run where, in what order, and what that is predicted to cost."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

import schedules

from ..capture import TensorSpec
from ..cluster import Cluster, Device
from ..document import Document, Value
from ..profiling import Profile

# Which micro-batches a stage runs its forward again for, right before their backward, instead of keeping the stash.
Recompute = Literal["never", "except-last", "always"]


class StagePlan(Value):
    """One stage: a connected piece of the model on one device.

    Attributes:
        layers: names of its layers, in execution order.
        device: name of its device in the plan's cluster.
        forward_seconds, backward_input_seconds, backward_weight_seconds: predicted for one micro-batch.
        output_bytes: what it sends to the next stage, or returns.
        transfer_seconds: to move its inputs and outputs and their gradients for one micro-batch.
        static_bytes: parameters, gradients and optimizer state.
        stash_bytes: kept for backward for each micro-batch in flight.
        recompute: of which micro-batches only the input is kept, and the rest made again right before the backward:
            of none, of all but the last of a step, or of all.
        recompute_seconds: predicted to make it again for one micro-batch; 0 where that is never done.
        boundary_bytes: the input, kept in place of the stash where it is made again.
        transient_bytes: needed for a while by one layer's forward or backward.
        in_flight: micro-batches whose stash is held at once, at most.
    """

    layers: tuple[str, ...] = Field(min_length=1)
    device: str
    forward_seconds: float = 0.0
    backward_input_seconds: float = 0.0
    backward_weight_seconds: float = 0.0
    transfer_seconds: float = 0.0
    output_bytes: int = 0
    static_bytes: int = 0
    stash_bytes: int = 0
    recompute: Recompute = "never"
    recompute_seconds: float = 0.0
    boundary_bytes: int = 0
    transient_bytes: int = 0
    in_flight: int = 0

    @property
    def load_seconds(self) -> float:
        """What one micro-batch costs this stage: compute and communication."""
        compute = self.forward_seconds + self.backward_input_seconds + self.backward_weight_seconds
        return compute + self.recompute_seconds + self.transfer_seconds

    @property
    def kept_bytes(self) -> int:
        """The most that the stage keeps for backward at once: stashes, and inputs of what is made again."""
        whole = {"never": self.in_flight, "except-last": 2, "always": 1}[self.recompute]
        whole = min(whole, self.in_flight)
        return whole * self.stash_bytes + (self.in_flight - whole) * self.boundary_bytes

    @property
    def memory_bytes(self) -> int:
        """The most that the stage holds at once."""
        return self.static_bytes + self.kept_bytes + self.transient_bytes


class Prediction(Value):
    """What a plan is predicted to cost.

    Attributes:
        step_seconds: forward and backward of one mini-batch.
        memory_bytes: the most that each device holds at once, one number a device of the cluster.
        bubble: idle fraction of the devices within a step.
        bottleneck_seconds: the largest load of any stage for one micro-batch; no cut of the same layers into as
            many stages on these devices has a smaller one within their memory.
        serial_seconds: the same micro-batches one after the other on one device like the one profiled.
    """

    step_seconds: float
    memory_bytes: tuple[int, ...]
    bubble: float
    bottleneck_seconds: float
    serial_seconds: float


class Plan(Document):
    """A model cut into stages, and the schedule that runs them.

    Attributes:
        stages: in pipeline order.
        cluster: the devices that they run on.
        schedule: name of the schedule.
        micro_batches: parts that a mini-batch is split into.
        chunks: stages of each device; which device each stage is on is the schedule's to say.
        prediction: what a step costs, None for a plan written by hand.
        fingerprint: of the profile's layers; empty for a plan written by hand.
        outputs: of the model for one micro-batch, as profiled.
    """

    stages: tuple[StagePlan, ...] = Field(min_length=1)
    cluster: Cluster
    schedule: str
    micro_batches: int = Field(ge=1)
    chunks: int = Field(default=1, ge=1)
    prediction: Prediction | None = None
    fingerprint: str = ""
    outputs: tuple[TensorSpec, ...] = ()

    @model_validator(mode="after")
    def _devices_exist(self) -> Self:
        if self.schedule not in schedules.names():
            raise ValueError(
                f"no schedule is called {self.schedule!r}: there are {', '.join(schedules.names())}"
            )
        known = [device.name for device in self.cluster.devices]
        for index, stage in enumerate(self.stages):
            if stage.device not in known:
                raise ValueError(f"stage {index} is on device {stage.device!r}, the cluster has {known}")
        return self

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each stage, in pipeline order."""
        return tuple(self.cluster.device(stage.device) for stage in self.stages)

    @property
    def workers(self) -> tuple[Device, ...]:
        """The devices in the order of the schedule's rows, each once however many stages it has."""
        placement = self.build_schedule().device_of
        return tuple(self.devices[placement.index(row)] for row in range(max(placement) + 1))

    @property
    def predicted(self) -> Prediction:
        """The prediction.

        Raises:
            ValueError: the plan was written by hand and has none.
        """
        if self.prediction is None:
            raise ValueError("this plan carries no prediction: make it with pipepart.plan")
        return self.prediction

    def build_schedule(self, micro_batches: int | None = None) -> schedules.Schedule:
        """The schedule of one step, for the plan's number of micro-batches or another one."""
        count = self.micro_batches if micro_batches is None else micro_batches
        devices = len(self.stages) // self.chunks
        bare = schedules.build(self.schedule, devices=devices, micro_batches=count, chunks=self.chunks)
        for mode, parts in (("always", range(count)), ("except-last", range(count - 1))):
            again = [index for index, stage in enumerate(self.stages) if stage.recompute == mode]
            if again:
                bare = schedules.insert_recompute(bare, again, parts)
        return bare

    def simulate(self) -> schedules.Timeline:
        """The predicted timeline of one step."""
        return schedules.simulate(self.build_schedule(), self._stage_costs())

    def _stage_costs(self) -> schedules.StageCosts:
        link = self.cluster.link
        return schedules.StageCosts(
            forward=[stage.forward_seconds for stage in self.stages],
            backward_input=[stage.backward_input_seconds for stage in self.stages],
            backward_weight=[stage.backward_weight_seconds for stage in self.stages],
            latency=link.latency,
            bandwidth=link.bandwidth or math.inf,
            message_bytes=[stage.output_bytes for stage in self.stages],
            stash_bytes=[stage.stash_bytes for stage in self.stages],
            boundary_bytes=[stage.boundary_bytes for stage in self.stages],
            recompute=[stage.recompute_seconds for stage in self.stages],
        )
