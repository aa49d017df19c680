"""Plan: which layers run where, in what order, and what that is predicted to cost."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

import schedules

from ..capture import TensorSpec
from ..cluster import Cluster, Device
from ..document import ByteCount, Document, Seconds, Value, fault_texts
from ..profiling import Profile
from .costs.layer_ranges import ChainCosts
from .costs.stage_memory import StashCounts, with_recompute
from .partition.replicas import all_stages, reduce_seconds, stage_devices
from .plan_checks import memory_faults, structure_faults
from .prediction import Piece, stage_plans
from .search.order_text import SEARCH, searched_order
from .stage_plan import Recompute, StagePlan


class Prediction(Value):
    """What a plan is predicted to cost.

    Attributes:
        step_seconds: forward and backward of one mini-batch.
        memory_bytes: the most that each device holds at once, one number a device of the cluster.
        bubble: idle fraction of the devices within a step.
        bottleneck_seconds: the largest load of any device for one micro-batch.
        bottleneck_bound: no cut of the same layers into as many stages on these devices, in whatever order, has a
            smaller one within their memory; 0 where nothing is known, as of a cut that was edited by hand.
        serial_seconds: the same micro-batches one after the other on one device like the one profiled.
        found_for: tells the devices apart that the bound holds for from those of a plan that was edited.
    """

    step_seconds: Seconds
    memory_bytes: tuple[ByteCount, ...]
    bubble: float = Field(allow_inf_nan=False)
    bottleneck_seconds: Seconds
    bottleneck_bound: Seconds = 0.0
    serial_seconds: Seconds
    found_for: str = ""

    @property
    def optimal(self) -> bool:
        """Whether the bottleneck is proven to be the smallest there is."""
        return self.bottleneck_seconds <= self.bottleneck_bound * (1 + 1e-9)


class Alternative(Value):
    """Another plan that was looked at.

    Attributes:
        schedule, micro_batches, chunks, replicas, stages: as in :class:`Plan`; ``stages`` is their number.
        step_seconds: predicted; None where it does not fit.
        memory_bytes: the most that any device holds; of one that does not fit, None.
        why: it was not taken.
    """

    schedule: str
    micro_batches: int = Field(ge=1)
    chunks: int = Field(ge=1)
    replicas: int = Field(default=1, ge=1)
    stages: int = Field(ge=1)
    step_seconds: Seconds | None = None
    memory_bytes: ByteCount | None = None
    why: str


class Plan(Document):
    """A model cut into stages, and the schedule that runs them.

    Attributes:
        stages: in pipeline order.
        cluster: the devices that they run on.
        schedule: name of the schedule.
        micro_batches: parts that a mini-batch is split into.
        chunks: stages of each device; which device each stage is on is the schedule's to say.
        actions: of each device, where the schedule is "search": the order that was found for these stages, as in
            ``schedules.Action``, of one copy of the model and without what runs again.
        split_critical: full backwards on the critical path that run as their two parts (I, then W), so that the
            gradient of the stage's input leaves before its weight gradients are computed; as in ``schedules.Action``.
            Ignored for a number of micro-batches other than the plan's.
        replica_devices: the devices of each further replica of the model, one name a stage. Each micro-batch runs
            through one replica; gradients are summed over replicas.
        prediction: what a step costs, None for a plan written by hand.
        fingerprint: of the profile's layers; empty for a plan written by hand.
        outputs: of the model for one micro-batch, as profiled.
        profile: the layers and their costs at this micro-batch size; None for a plan written by hand.
        edges: of a model with branches, the pairs of layers ``(a, b)`` such that b uses the output of a; empty for a
            chain. ``profile`` then has what crosses the border behind each layer as that layer's output.
        alternatives: the runners-up, the fastest first, and why they lost.
    """

    stages: tuple[StagePlan, ...] = Field(min_length=1)
    cluster: Cluster
    schedule: str
    micro_batches: int = Field(
        ge=1, le=100_000
    )  # the schedule of more would fill the memory before it is refused
    chunks: int = Field(default=1, ge=1)
    actions: tuple[tuple[str, ...], ...] = ()
    split_critical: tuple[str, ...] = ()
    replica_devices: tuple[tuple[str, ...], ...] = ()
    prediction: Prediction | None = None
    fingerprint: str = ""
    outputs: tuple[TensorSpec, ...] = ()
    profile: Profile | None = None
    edges: tuple[tuple[str, str], ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        faults = structure_faults(self)
        if faults:
            raise ValueError("\n  ".join(faults))
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a plan that :meth:`save` wrote, edited or not: what its stages cost is computed anew.

        Raises:
            ValueError: the file is no plan of this version, or the plan is impossible: a layer is missing, unknown or
                there twice, a stage is not a connected piece of the model, or the memory of a device does
                not do. Every fault is named.
            OSError: the file cannot be read.
        """
        read = super().load(path)
        try:
            read = read.refreshed()
        except (ValueError, ArithmeticError) as error:
            faults = fault_texts(error) if isinstance(error, ValidationError) else [str(error)]
            raise ValueError(
                f"{path} holds a plan whose costs are too large:\n  " + "\n  ".join(faults)
            ) from None
        faults = memory_faults(read)
        if faults:
            raise ValueError(f"{path} holds a plan that does not fit its devices:\n  " + "\n  ".join(faults))
        return read

    def refreshed(self) -> Self:
        """The plan with the figures of its stages and its prediction computed from its profile.

        What was known of the best cut, and the runners-up, are kept only where nothing had been edited.
        """
        if self.profile is None:
            return self
        costs = ChainCosts(self.profile, self.profile.at(self.micro_batches))
        index = {info.name: position for position, info in enumerate(self.profile.layers)}
        pieces = [
            Piece(slice(index[stage.layers[0]], index[stage.layers[-1]] + 1), stage.device, stage.recompute)
            for stage in self.stages
        ]
        held = StashCounts(self.build_schedule())
        stages = stage_plans(self.profile, costs, self.cluster, pieces, held.by_stage, held.older)
        fresh = self.model_copy(update={"stages": stages})
        found = fresh.predict(costs.total_seconds)
        kept = self.prediction
        if (
            kept is not None
            and stages == self.stages
            and found == kept.model_copy(update={"bottleneck_bound": 0.0})
            and kept.bottleneck_bound <= found.bottleneck_seconds * (1 + 1e-9)
        ):
            return self
        return fresh.model_copy(update={"prediction": found, "alternatives": ()})

    def predict(self, micro_batch_seconds: float, bottleneck_bound: float = 0.0) -> Prediction:
        """Simulates one step.

        Args:
            micro_batch_seconds: of one micro-batch on one device like the one profiled.
            bottleneck_bound: what no cut can beat.
        """
        timeline = self.simulate()
        loads: dict[tuple[int, str], float] = {}
        for number, stage in enumerate(self.all_stages):
            key = number // len(self.stages), stage.device
            loads[key] = loads.get(key, 0.0) + stage.load_seconds
        held = dict.fromkeys((device.name for device in self.cluster.devices), 0)
        for device, size in self.device_bytes(timeline).items():
            held[device] = size
        return Prediction(
            step_seconds=timeline.makespan,
            memory_bytes=tuple(held.values()),
            bubble=timeline.bubble,
            bottleneck_seconds=max(loads.values()),
            bottleneck_bound=bottleneck_bound,
            serial_seconds=micro_batch_seconds * self.micro_batches,
            found_for=_digest(self.cluster),
        )

    def device_bytes(self, timeline: schedules.Timeline | None = None) -> dict[str, int]:
        """The most that each device in use holds: the state of its stages, their stashes, and one layer's transient."""
        peaks, stages = (timeline or self.simulate()).peak_bytes, self.all_stages
        found = {}
        for worker, peak in zip(self.workers, peaks, strict=True):
            own = [stage for stage in stages if stage.device == worker.name]
            transient = max(stage.transient_bytes for stage in own)
            found[worker.name] = sum(stage.static_bytes for stage in own) + int(peak) + transient
        return found

    @property
    def replicas(self) -> int:
        """How many copies of the model train on devices of their own; a bidirectional schedule has more of each."""
        return 1 + len(self.replica_devices)

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule changes weights within a step, so that the numbers are not those of plain training."""
        return bool(self.build_schedule().versions)

    @property
    def all_stages(self) -> tuple[StagePlan, ...]:
        """The stages of all copies of the model, as the schedule numbers them; ``stages`` are those of the first."""
        return all_stages(self, self.build_schedule())

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each stage of the first copy of the model, in pipeline order."""
        return tuple(self.cluster.device(stage.device) for stage in self.stages)

    @property
    def workers(self) -> tuple[Device, ...]:
        """The devices in the order of the schedule's rows, each once however many stages it has."""
        schedule = self.build_schedule()
        names = dict(zip(schedule.device_of, stage_devices(self, schedule), strict=True))
        return tuple(self.cluster.device(names[row]) for row in range(schedule.devices))

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
        """The schedule of one step, for the plan's number of micro-batches or another one.

        Raises:
            ScheduleError: there is none for this number; one that was searched for exists for fewer only.
        """
        count = self.micro_batches if micro_batches is None else micro_batches
        devices = len(self.stages) // self.chunks
        modes = tuple(stage.recompute for stage in self.stages)
        split_critical = self.split_critical if count == self.micro_batches else ()
        return _schedule(
            self.schedule, self.actions, devices, count, self.chunks, modes, self.replicas, split_critical
        )

    def simulate(self) -> schedules.Timeline:
        """The predicted timeline of one step."""
        return schedules.simulate(self.build_schedule(), self.stage_costs())

    def stage_costs(self) -> schedules.StageCosts:
        """What the schedule's stages cost, those of all copies of the model, on their devices and links."""
        latency, bandwidth = self._links()
        stages = self.all_stages
        return schedules.StageCosts(
            forward=[stage.forward_seconds for stage in stages],
            backward_input=[stage.part_seconds[0] for stage in stages],
            backward_weight=[stage.part_seconds[1] for stage in stages],
            backward=[stage.backward_seconds for stage in stages],
            latency=latency,
            bandwidth=bandwidth,
            message_bytes=[stage.output_bytes for stage in stages],
            stash_bytes=[stage.stash_bytes for stage in stages],
            weight_stash_bytes=[stage.deferred_bytes for stage in stages],
            boundary_bytes=[stage.boundary_bytes for stage in stages],
            recompute=[stage.recompute_seconds for stage in stages],
            reduce_grad=reduce_seconds(self, stages),
        )

    def _links(self) -> tuple[float | list[list[float]], float | list[list[float]]]:
        """Latency and bandwidth: one for all pairs of devices, or [from][to] in the order of the schedule's rows."""
        if not self.cluster.links:
            return self.cluster.link.latency, self.cluster.link.bandwidth or math.inf
        names = [device.name for device in self.workers]
        links = [[self.cluster.link_between(one, other) for other in names] for one in names]
        return (
            [[link.latency for link in row] for row in links],
            [[link.bandwidth or math.inf for link in row] for row in links],
        )


@lru_cache(maxsize=4)  # one plan is asked again and again
def _schedule(
    name: str,
    actions: tuple[tuple[str, ...], ...],
    devices: int,
    micro_batches: int,
    chunks: int,
    modes: tuple[Recompute, ...],
    replicas: int,
    split_critical: tuple[str, ...],
) -> schedules.Schedule:
    each = -(-micro_batches // replicas)
    if name == SEARCH:
        bare = searched_order(actions, each)
    else:
        bare = schedules.build(name, devices=devices, micro_batches=each, chunks=chunks)
    one = with_recompute(bare, modes)
    whole = schedules.replicate(one, replicas, micro_batches)
    if split_critical:
        whole = schedules.split_backward(whole, map(schedules.Action.parse, split_critical))
    return schedules.insert_reduce_grad(whole) if whole.replicas > 1 else whole


def _digest(cluster: Cluster) -> str:
    return hashlib.sha256(cluster.model_dump_json().encode()).hexdigest()[:16]
