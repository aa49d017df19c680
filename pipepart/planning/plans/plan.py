"""Plan: the stages of a model, their devices, schedule and predicted costs; validated on creation and on load."""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

import schedules

from ...cluster import Cluster, Device
from ...document import Document, fault_texts
from ...input_error import InputError
from ...pages import notebook_html, to_html
from ...profiling import Profile
from ...units import counted, format_bytes, format_seconds
from ..costs.layer_ranges import TOLERANCE, ChainCosts
from ..costs.stage_memory import Mode, StashCounts, device_peak_bytes
from ..costs.step_bound import bound_on_cluster
from ..overhead import most_on_a_host, serial_seconds, with_overhead
from ..partition.reductions import runs_collectives
from ..partition.replicas import all_stages, stage_devices
from ..partition.tensor_groups import group_of, tensor_groups
from .export import Export
from .inside_stage import inside_faults, shard_text, tensor_text
from .options import PlanOptions
from .plan_faults import memory_faults, structure_faults
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


class Plan(Document):
    """A model cut into stages, and the schedule that runs them.

    Attributes:
        kind: of the file.
        stages: in pipeline order.
        cluster: the devices that the stages run on.
        schedule: name of the schedule, or ``"search"``.
        micro_batches: number of micro-batches of a mini-batch.
        chunks: number of stages per device; the schedule determines which stages. Ignored under ``"search"``.
        actions: if the schedule is ``"search"``, the actions of each device in order, in the notation of
            ``schedules.Action``, for one replica and without recomputes. Devices may have different numbers of stages.
        replica_devices: for each replica after the first, the device name of each stage. Each micro-batch runs through
            one replica; gradients are summed over replicas.
        tensor: number of devices that share the layers of each stage: the device of a stage and those that follow it in
            the cluster. 1 without tensor parallelism.
        shard: True if the parameters of each stage are sharded over its replicas.
        prediction: None for a plan written by hand.
        profile: the layers and their costs at this micro-batch size; None for a plan written by hand.
        alternatives: other plans that were considered, fastest first.
        out_of_time: True if the time limit ``seconds`` ended the search. A larger limit or an idle machine may give a
            shorter step.
        constraints: the keywords of :func:`pipepart.plan` that the plan was requested with.
    """

    kind: Literal["plan"] = "plan"
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    cluster: Cluster
    schedule: str
    # The upper limit refuses numbers whose schedule would not fit the memory of the computer.
    micro_batches: int = Field(ge=1, le=100_000)
    chunks: int = Field(default=1, ge=1)
    actions: tuple[tuple[str, ...], ...] = ()
    replica_devices: tuple[tuple[str, ...], ...] = ()
    tensor: int = Field(default=1, ge=1)
    shard: bool = False
    prediction: Prediction | None = None
    profile: Profile | None = None
    alternatives: tuple[Alternative, ...] = ()
    out_of_time: bool = False
    constraints: PlanOptions = PlanOptions()

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        order = self._order(self.micro_batches)
        groups = self.groups  # raises if there are none
        faults = list(structure_faults(self.stages, self._devices, groups, order, self.profile))
        faults += inside_faults(self.tensor, self.shard, self.replicas, self.schedule, self.stages)
        memory = self.prediction.memory_bytes if self.prediction else ()
        if not self.profile and self.prediction and len(memory) != len(self.cluster):
            faults.append(
                f"the prediction has the memory of {len(memory)} devices, there are {len(self.cluster)}"
            )
        if faults:
            raise InputError("\n  ".join(faults))
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan file that :meth:`save` wrote, edited or not, and recompute the predictions of its stages.

        Raises:
            ValueError: the file is not a plan of this version, or the plan is impossible: a layer is missing, unknown
                or in two stages, a stage is not connected, or a device has too little memory. Lists every fault.
            OSError: the file cannot be read.
        """
        read = super().load(path)
        try:
            read = read.refreshed()
        except (ValueError, ArithmeticError) as error:
            faults = fault_texts(error) if isinstance(error, ValidationError) else [str(error)]
            raise InputError(
                f"{path} holds a plan whose costs are too large:\n  " + "\n  ".join(faults)
            ) from None
        if faults := list(memory_faults(read.device_bytes(), read.all_stages, len(read.stages), read.groups)):
            raise InputError(f"{path} holds a plan that does not fit its devices:\n  " + "\n  ".join(faults))
        return read

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
        pairs = {(row[at], row[to]) for row in self._devices for at, to in sending_pairs(self.stages)}
        links = [self.cluster.link_between(*pair) for pair in pairs if pair[0] != pair[1]]
        dtypes = " and ".join(sorted({link.compress.dtype for link in links if link.compress is not None}))
        return f"activations and gradients as {dtypes}: not the numbers of plain training" if dtypes else ""

    @property
    def inside(self) -> tuple[str, ...]:
        """Texts for users: how the stages are parallel inside, and the seconds of their collectives."""
        texts = []
        if self.tensor > 1:
            texts.append(
                tensor_text(self.tensor, self.stages, self.profile, self.cluster, self.micro_batches)
            )
        if self.shard:
            texts.append(shard_text(self.replicas, max(self.stage_costs().reduce_grad)))
        return tuple(texts)

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
        return all_stages(self.stages, names, self.cluster, runs_collectives(self.cluster, self.shard))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each stage of the first replica, in pipeline order."""
        return tuple(self.cluster.device(stage.device) for stage in self.stages)

    @property
    def groups(self) -> Cluster:
        """The cluster with one device for each group of ``tensor`` devices; the cluster itself without groups."""
        return tensor_groups(self.cluster, self.tensor)

    @property
    def unused_devices(self) -> tuple[str, ...]:
        """The names of the cluster's devices that no stage is on."""
        used = {stage.device for stage in self.stages}.union(*self.replica_devices)
        firsts = (device.name for device in self.groups.devices if device.name not in used)
        return tuple(member.name for name in firsts for member in group_of(self.cluster, name, self.tensor))

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
        copies = self.replicas * self.first_replica.build_schedule().replicas
        return bound_on_cluster(self.profile, self.cluster, self.micro_batches, copies, self.tensor)

    @property
    def step_gap(self) -> float:
        """Relative gap of the predicted step to :attr:`step_bound`: 0.02 is 2 % above the bound."""
        step, bound = self.predicted.step_seconds, self.step_bound
        return step / bound - 1 if bound else 0.0

    @property
    def fits(self) -> bool:
        """True if the predicted memory of every device is within its limit."""
        needs = zip(self.cluster.devices, self.predicted.memory_bytes, strict=True)
        return all(need <= device.memory for device, need in needs)

    def __str__(self) -> str:
        """A short summary: schedule, prediction, and one line per stage. ``model_dump_json`` has all fields."""
        step = f": {format_seconds(self.prediction.step_seconds)} a step" if self.prediction else ""
        if self.prediction and self.step_bound:
            step += (
                f", at most {self.step_gap:.1%} above the lower bound for as many micro-batches and replicas"
            )
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
        lines += [f"  {text}" for text in (*self.inside, *self.queues)]
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

    def predict(self, costs: ChainCosts | None = None) -> Self:
        """Return the plan with stages predicted from its profile, and with the prediction of a simulated step.

        Args:
            costs: of the profile's layers at this micro-batch size; None to compute them, as slow as the layers are
                while all devices of the plan compute.
        """
        assert self.profile is not None
        profile, cluster = self.profile, self.cluster
        if costs is None:
            profile, cluster = self.with_overhead()
            gathers = self.constraints.reduction == "batch"
            measured = profile.at(self.micro_batches)
            costs = ChainCosts(profile, measured, gathers_outputs=gathers, shards=self._shards)
        stages = predict_stages(self.stages, profile, costs, tensor_groups(cluster, self.tensor))
        fresh = self.model_copy(update={"stages": stages, "cluster": cluster})
        timeline = fresh.simulate()
        counts = fresh._stash_counts(timeline)
        fresh = fresh.model_copy(update={"stages": with_peaks(stages, counts)})
        loads: dict[tuple[int, str], float] = {}
        for number, stage in enumerate(fresh.all_stages):
            key = number // len(stages), stage.device
            loads[key] = loads.get(key, 0.0) + stage.load_seconds
        needs = fresh._device_bytes(counts)
        prediction = Prediction(
            step_seconds=timeline.makespan + cluster.step_seconds,
            memory_bytes=tuple(
                needs.get(group.name, 0) for group in self.groups.devices for _ in range(self.tensor)
            ),
            bubble=timeline.bubble,
            bottleneck_seconds=max(loads.values()),
            serial_seconds=serial_seconds(profile, self.micro_batches),
            found_for=hashlib.sha256(cluster.model_dump_json().encode()).hexdigest()[:16],
        )
        return fresh.model_copy(update={"prediction": prediction})

    def simulate(self) -> schedules.Timeline:
        """Return the predicted timeline of one step of all replicas, from its first action to its last.

        As in a measured timeline, the seconds before and after them (``cluster.step_seconds``) are left out. The
        prediction has them in ``step_seconds``.
        """
        return schedules.simulate(self.build_schedule(), self.stage_costs(), contention=True)

    def stage_costs(self) -> schedules.StageCosts:
        """Return the costs of the stages of all replicas on their devices and links, for ``schedules.simulate``."""
        # Seconds of each micro-batch relative to the mean; empty for equal sizes, or with several replicas.
        entries = self.profile.costs if self.profile is not None and self.replicas == 1 else ()
        scale = next((each.scale for each in entries if each.micro_batches == self.micro_batches), ())
        return step_costs(
            self.all_stages, self.build_schedule(), self.groups, self._devices, scale, self.shard
        )

    def device_bytes(self, timeline: schedules.Timeline | None = None) -> dict[str, int]:
        """Return the peak bytes of each device in use; :func:`~.costs.stage_memory.device_peak_bytes` has the formula.

        Args:
            timeline: of a step, which determines how long messages wait on a device. If None, return the larger of two
                peaks, as in ``prediction.memory_bytes``: that of the simulated step, and that of a step in which all
                stages take equal times. The second covers real steps with other times than simulated.
        """
        if timeline is not None:
            return self._device_bytes(StashCounts(self.build_schedule(), timeline, self._summed_replicas))
        return self._device_bytes(self._stash_counts(self.simulate()))

    def export(self, engine: str) -> Export:
        """Return the plan in the files of another engine; ``save(folder)`` of the result writes them.

        Args:
            engine: "torch-pipelining" or "torchtitan".

        Raises:
            ValueError: no engine has this name, or the engine cannot run the plan. Lists every reason, and what to plan
                instead.
        """
        return import_module("pipepart.planning.export").export_plan(self, engine)

    def to_html(self) -> str:
        """Return the plan and its predicted step as an HTML page that needs no other file and no network."""
        return to_html(self)

    def _repr_html_(self) -> str:
        """Show the stages, their memory and the predicted timeline in a notebook."""
        return notebook_html(self)

    def with_overhead(self) -> tuple[Profile, Cluster]:
        """Return profile and cluster with the seconds of the runtime, and of layers that compute beside each other.

        The profile of a plan keeps the seconds of a layer that computes alone.
        """
        assert self.profile is not None
        return with_overhead(self.profile, self.cluster, self.tensor * most_on_a_host(self.workers) or None)

    @property
    def _shards(self) -> int:
        """Number of replicas that share the parameters of a stage."""
        return self.replicas if self.shard else 1

    @property
    def _devices(self) -> list[tuple[str, ...]]:
        """The device names of the stages, for each replica."""
        return [tuple(stage.device for stage in self.stages), *self.replica_devices]

    @property
    def _summed_replicas(self) -> int:
        """Number of replicas whose gradients are summed on the devices of the first replica."""
        replicas = 1 if runs_collectives(self.cluster, self.shard) else self.replicas
        return replicas * self.first_replica.build_schedule().replicas

    def _order(self, micro_batches: int) -> StepOrder:
        return StepOrder(
            schedule=self.schedule,
            chunks=self.chunks,
            actions=self.actions,
            micro_batches=micro_batches,
            modes=tuple(stage.mode for stage in self.stages),
            replicas=self.replicas,
        )

    def _stash_counts(self, timeline: schedules.Timeline) -> StashCounts:
        """Return the stash counts of a step of this plan, and of a step in which all stages take equal times."""
        even = even_counts(self._order(self.micro_batches), self._summed_replicas)
        return StashCounts(self.build_schedule(), timeline, self._summed_replicas, even)

    def _device_bytes(self, counts: StashCounts) -> dict[str, int]:
        stages, schedule = self.all_stages, self.build_schedule()
        needs = {}
        for row, (worker, moments) in enumerate(zip(self.workers, counts.by_device, strict=True)):
            sizes = sizes_of([stages[number] for number in schedule.stages_of(row)])
            # Older versions of the weights are in the static_bytes of the stages already.
            none_older = np.zeros((1, moments.shape[1]), dtype=np.int64)
            needs[worker.name] = int(device_peak_bytes(sizes, moments[None], none_older)[0, 0])
        return needs
