"""PlanRecord: the fields of a plan, and the schedule, costs and predictions computed from them."""

from __future__ import annotations

import hashlib
import math
from typing import Literal, Self

import numpy as np
from pydantic import Field

import schedules

from ...capture import TensorSpec
from ...cluster import Cluster, Device
from ...document import Document
from ...input_error import InputError
from ...profiling import Profile
from ...units import counted, format_bytes, format_seconds
from ..costs.layer_ranges import TOLERANCE, ChainCosts
from ..costs.stage_memory import Mode, StashCounts, device_peak_bytes
from ..costs.step_bound import step_bound
from ..overhead import serial_seconds, with_overhead
from ..partition.reductions import runs_all_reduce
from ..partition.replicas import all_stages, stage_devices
from .options import PlanOptions
from .prediction import Alternative, Prediction
from .searched_order import StepOrder, build_order, even_counts
from .stage_plan import StagePlan, predict_stages, sizes_of, with_peaks
from .step_costs import sending_pairs, step_costs

_MODE_TEXTS: dict[Mode, str] = {
    "never": "",
    "except-last": ", recomputes all but the last micro-batch",
    "always": ", recomputes",
    "offload": ", offloads its stash",
}


class PlanRecord(Document):
    """The fields of a plan, without validation; see :class:`~pipepart.planning.Plan`."""

    kind: Literal["plan"] = "plan"
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    cluster: Cluster
    schedule: str
    # The upper limit refuses numbers whose schedule would not fit the memory of the computer.
    micro_batches: int = Field(ge=1, le=100_000)
    chunks: int = Field(default=1, ge=1)
    actions: tuple[tuple[str, ...], ...] = ()
    split_critical: tuple[str, ...] = ()
    replica_devices: tuple[tuple[str, ...], ...] = ()
    prediction: Prediction | None = None
    fingerprint: str = ""
    outputs: tuple[TensorSpec, ...] = ()
    profile: Profile | None = None
    alternatives: tuple[Alternative, ...] = ()
    out_of_time: bool = False
    constraints: PlanOptions = PlanOptions()

    @property
    def replicas(self) -> int:
        """Number of replicas on separate devices. A bidirectional schedule has two copies of the model in each."""
        return 1 + len(self.replica_devices)

    @property
    def asynchronous(self) -> bool:
        """True if the schedule changes weights within a step, so that training differs from plain training."""
        return bool(self.build_schedule().versions)

    @property
    def compressed(self) -> str:
        """Text for users: how messages between stages are compressed; empty without compression."""
        pairs = {
            (row[source], row[target])
            for row in self._devices
            for source, target in sending_pairs(self.stages)
        }
        links = [self.cluster.link_between(*pair) for pair in pairs if pair[0] != pair[1]]
        dtypes = sorted({link.compress.dtype for link in links if link.compress is not None})
        if not dtypes:
            return ""
        return f"activations and gradients as {' and '.join(dtypes)}: not the numbers of plain training"

    @property
    def queues(self) -> tuple[str, ...]:
        """Texts for users: the stages for which more messages may wait than the plan has stages."""
        return tuple(
            f"up to {stage.waiting_messages} messages wait for stage {number}: senders do not wait, the memory has room"
            for number, stage in enumerate(self.stages)
            if stage.waiting_messages > len(self.stages)
        )

    @property
    def all_stages(self) -> tuple[StagePlan, ...]:
        """The stages of all replicas, numbered as in the schedule. ``stages`` has only the first replica."""
        names = stage_devices(self.stages, self.replica_devices, self.build_schedule())
        return all_stages(self.stages, names, self.cluster, self.profile is not None)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each stage of the first replica, in pipeline order."""
        return tuple(self.cluster.device(stage.device) for stage in self.stages)

    @property
    def unused_devices(self) -> tuple[str, ...]:
        """The names of the cluster's devices that no stage is on."""
        used = {stage.device for stage in self.stages}.union(*self.replica_devices)
        return tuple(device.name for device in self.cluster.devices if device.name not in used)

    @property
    def workers(self) -> tuple[Device, ...]:
        """The device of each row of the schedule. Each device appears once, even with several stages."""
        schedule = self.build_schedule()
        names_of_stages = stage_devices(self.stages, self.replica_devices, schedule)
        names = dict(zip(schedule.device_of, names_of_stages, strict=True))
        return tuple(self.cluster.device(names[row]) for row in range(schedule.devices))

    @property
    def first_replica(self) -> Self:
        """The plan of the first replica alone, with its part of the micro-batches. Predictions are not updated."""
        if self.replicas == 1:
            return self
        micro_batches = -(-self.micro_batches // self.replicas)
        return self.model_copy(update={"replica_devices": (), "micro_batches": micro_batches})

    @property
    def predicted(self) -> Prediction:
        """The prediction of the plan.

        Raises:
            ValueError: the plan was written by hand, without a prediction.
        """
        if self.prediction is None:
            raise InputError("this plan carries no prediction: make it with pipepart.plan")
        return self.prediction

    @property
    def step_bound(self) -> float:
        """Lower bound in seconds for all plans on this cluster with as many micro-batches and replicas.

        0 without a profile. The bound holds for any cut, any placement of stages and any order of actions. It ignores
        transfers, recomputes and memory limits, so an optimal plan may still be slower.
        """
        if self.profile is None:
            return 0.0
        costs = self.profile.at(self.micro_batches)
        speeds = [device.speed for device in self.cluster.devices]
        action = min(device.action_seconds for device in self.cluster.devices)
        copies = self.replicas * self.first_replica.build_schedule().replicas
        return step_bound(costs, speeds, copies, action) + self.cluster.step_seconds

    @property
    def step_gap(self) -> float:
        """Relative gap of the predicted step to :attr:`step_bound`: 0.02 is 2 % above the bound."""
        step, bound = self.predicted.step_seconds, self.step_bound
        return step / bound - 1 if bound else 0.0

    @property
    def fits(self) -> bool:
        """True if the predicted memory of every device is within its limit."""
        needs = zip(self.cluster.devices, self.predicted.memory_bytes, strict=True)
        return all(device.memory_bytes is None or need <= device.memory_bytes for device, need in needs)

    def __str__(self) -> str:
        """A short summary: schedule, prediction, and one line per stage. ``model_dump_json`` has all fields."""
        step = f": {format_seconds(self.prediction.step_seconds)} a step" if self.prediction else ""
        if self.prediction and self.step_bound:
            numbers = (
                f"{counted(self.micro_batches, 'micro-batch', 'es')} and {counted(self.replicas, 'replica')}"
            )
            step += f", at most {self.step_gap:.1%} above the lower bound for {numbers}"
        lines = [
            f"{type(self).__name__} {self.schedule!r}, {counted(self.micro_batches, 'micro-batch', 'es')}, "
            f"{counted(len(self.stages), 'stage')}{step}"
        ]
        for number, stage in enumerate(self.stages):
            layers = stage.layers
            span = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)} layers)"
            lines.append(
                f"  stage {number} on {stage.device}: {span}, {format_seconds(stage.load_seconds)} a micro-batch, "
                f"{format_bytes(stage.memory_bytes)}{_MODE_TEXTS[stage.mode]}"
            )
        lines += [f"  {text}" for text in self.queues]
        if self.compressed:
            lines.append(f"  sends {self.compressed}")
        if self.unused_devices:
            lines.append(f"  without {', '.join(self.unused_devices)}: the step would not be shorter")
        return "\n".join(lines)

    __repr__ = __str__

    def build_schedule(self, micro_batches: int | None = None) -> schedules.Schedule:
        """Build the schedule of one step.

        Args:
            micro_batches: number of micro-batches; None for that of the plan.

        Raises:
            ScheduleError: the schedule does not exist for this number. A searched order exists only for numbers up to
                that of the plan.
        """
        return build_order(self._order(self.micro_batches if micro_batches is None else micro_batches))

    def _order(self, micro_batches: int) -> StepOrder:
        return StepOrder(
            schedule=self.schedule,
            chunks=self.chunks,
            actions=self.actions,
            split_critical=self.split_critical if micro_batches == self.micro_batches else (),
            micro_batches=micro_batches,
            modes=tuple(stage.mode for stage in self.stages),
            replicas=self.replicas,
        )

    def refreshed(self) -> Self:
        """Return the plan with stages and prediction recomputed from its profile.

        The bottleneck bound and the alternatives are dropped if the plan was edited.
        """
        if self.profile is None:
            return self
        fresh = self.predict()
        prediction = self.prediction
        if (
            prediction is not None
            and fresh.stages == self.stages
            and fresh.predicted == prediction.model_copy(update={"bottleneck_bound": 0.0})
            and prediction.bottleneck_bound <= fresh.predicted.bottleneck_seconds * (1 + TOLERANCE)
        ):
            return self
        return fresh.model_copy(update={"alternatives": (), "out_of_time": False})

    def predict(self, costs: ChainCosts | None = None, bottleneck_bound: float = 0.0) -> Self:
        """Return the plan with stages predicted from its profile, and with the prediction of a simulated step.

        Args:
            costs: of the profile's layers at this micro-batch size; None to compute them.
            bottleneck_bound: lower bound of the bottleneck in seconds, stored in the prediction.
        """
        assert self.profile is not None
        profile, cluster = with_overhead(self.profile, self.cluster)
        if profile is not self.profile:
            update = {"profile": profile, "cluster": cluster}
            return self.model_copy(update=update).predict(bottleneck_bound=bottleneck_bound)
        if costs is None:
            gathers = self.constraints.reduction == "batch"
            measured = self.profile.at(self.micro_batches)
            relays = self.cluster.links_differ
            costs = ChainCosts(self.profile, measured, gathers_outputs=gathers, may_relay=relays)
        stages = predict_stages(self.stages, self.profile, costs, self.cluster)
        fresh = self.model_copy(update={"stages": stages})
        timeline = fresh.simulate()
        counts = fresh._stash_counts(timeline, fresh.summed_replicas)
        fresh = self.model_copy(update={"stages": with_peaks(stages, counts)})
        loads: dict[tuple[int, str], float] = {}
        for number, stage in enumerate(fresh.all_stages):
            key = number // len(stages), stage.device
            loads[key] = loads.get(key, 0.0) + stage.load_seconds
        needs = dict.fromkeys((device.name for device in self.cluster.devices), 0)
        needs |= fresh._device_bytes(counts)
        prediction = Prediction(
            step_seconds=timeline.makespan + self.cluster.step_seconds,
            memory_bytes=tuple(needs.values()),
            bubble=timeline.bubble,
            bottleneck_seconds=max(loads.values()),
            bottleneck_bound=bottleneck_bound,
            serial_seconds=serial_seconds(profile, self.micro_batches),
            found_for=hashlib.sha256(self.cluster.model_dump_json().encode()).hexdigest()[:16],
        )
        return fresh.model_copy(update={"prediction": prediction})

    def simulate(self) -> schedules.Timeline:
        """Return the predicted timeline of one step of all replicas."""
        return schedules.simulate(self.build_schedule(), self.stage_costs(), contention=True)

    def stage_costs(self) -> schedules.StageCosts:
        """Return the costs of the stages of all replicas on their devices and links, for ``schedules.simulate``."""
        return step_costs(
            self.all_stages, self.build_schedule(), self.cluster, self._devices, self._micro_batch_scale
        )

    def device_bytes(self, timeline: schedules.Timeline | None = None) -> dict[str, int]:
        """Return the peak bytes of each device in use; :func:`~.costs.stage_memory.device_peak_bytes` has the formula.

        Args:
            timeline: of a step, which determines how long messages wait on a device. If None, return the larger of two
                peaks, as in ``prediction.memory_bytes``: that of the simulated step, and that of a step in which all
                stages take equal times. The second covers real steps with other times than simulated.
        """
        if timeline is not None:
            return self._device_bytes(StashCounts(self.build_schedule(), timeline, self.summed_replicas))
        return self._device_bytes(self._stash_counts(self.simulate(), self.summed_replicas))

    def _stash_counts(self, timeline: schedules.Timeline, replicas: int) -> StashCounts:
        """Return the stash counts of a step, and of a step in which all stages take equal times.

        Args:
            timeline: of a step of this plan.
            replicas: number of replicas whose gradients are summed on the first replica.
        """
        even = even_counts(self._order(self.micro_batches), replicas)
        return StashCounts(self.build_schedule(), timeline, replicas, even)

    def _device_bytes(self, counts: StashCounts) -> dict[str, int]:
        stages, schedule = self.all_stages, self.build_schedule()
        needs = {}
        for row, (worker, moments) in enumerate(zip(self.workers, counts.by_device, strict=True)):
            sizes = sizes_of([stages[number] for number in schedule.stages_of(row)])
            none_older = np.zeros(
                (1, moments.shape[1]), dtype=np.int64
            )  # already in static_bytes of the stages
            needs[worker.name] = int(device_peak_bytes(sizes, moments[None], none_older)[0, 0])
        return needs

    def free_stash_bytes(self, timeline: schedules.Timeline) -> list[float]:
        """Return [schedule rows]: bytes for stashes (limit less other memory) of each device; infinite for no limit."""
        needs = self.device_bytes(timeline)
        return [
            math.inf if device.memory_bytes is None else device.memory_bytes - needs[device.name] + int(peak)
            for device, peak in zip(self.workers, timeline.peak_bytes, strict=True)
        ]

    @property
    def summed_replicas(self) -> int:
        """Number of replicas whose gradients are summed on the devices of the first replica."""
        replicas = 1 if runs_all_reduce(self.cluster) else self.replicas
        return replicas * self.first_replica.build_schedule().replicas

    @property
    def _micro_batch_scale(self) -> tuple[float, ...]:
        """[micro-batches]: seconds relative to the mean; empty for equal sizes, or with several replicas."""
        costs = self.profile.costs if self.profile is not None and self.replicas == 1 else ()
        return next((each.scale for each in costs if each.micro_batches == self.micro_batches), ())

    @property
    def _devices(self) -> list[tuple[str, ...]]:
        """The device names of the stages, for each replica."""
        return [tuple(stage.device for stage in self.stages), *self.replica_devices]
