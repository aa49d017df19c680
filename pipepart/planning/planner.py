"""Makes the plan: for each schedule and number of micro-batches the best cut, and of these the fastest step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import schedules

from ..cluster import Cluster
from ..profiling import Profile
from ..units import format_bytes
from .chain import ChainCut, Site, best_cut, shortage
from .plan import Plan, Prediction, StagePlan
from .stage_costs import ChainCosts, stage_slices

# One stage a device, and the micro-batches in flight at a stage depend only on the stages behind it.
SCHEDULES = ("1f1b", "gpipe", "sequential")

_INDISTINGUISHABLE = 0.01


class DoesNotFit(ValueError):
    """No cut of the model fits the devices.

    Attributes:
        stage: the stage that is short in the best cut there is.
        short_bytes: bytes that its device lacks.
    """

    def __init__(self, message: str, stage: int, short_bytes: int) -> None:
        super().__init__(message)
        self.stage = stage
        self.short_bytes = short_bytes


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str = "auto",
    micro_batches: int | Literal["auto"] = "auto",
    stages: int | Literal["auto"] | None = None,
) -> Plan:
    """The cut of a profiled chain over the devices of a cluster whose step is predicted to be the shortest.

    For each schedule and number of micro-batches that is asked for, the cut has the smallest bottleneck that any
    cut has whose stages fit their devices; the memory of a stage counts its stash as often as that schedule has
    micro-batches in flight there. Of these plans the one with the shortest simulated step is returned, and of
    those within 1 % of it the one that needs the least memory.

    Args:
        profile: measured costs of the layers.
        cluster: the devices, in the order in which stages are laid on them.
        schedule: a name, or ``"auto"`` to take the best.
        micro_batches: a number that was profiled, or ``"auto"`` to take the best of those.
        stages: how many; None for one a device, or fewer where only fewer fit; ``"auto"`` for the best number.

    Raises:
        ValueError: an unknown schedule, more stages than layers or devices, or micro-batches below 1 or not profiled.
        DoesNotFit: no cut fits; it names the stage that is short and by how many bytes.
    """
    if len(cluster) > len(profile.layers) and stages is None:
        raise ValueError(
            f"{len(cluster)} devices need as many stages, the model has {len(profile.layers)} layers: "
            f"use at most {len(profile.layers)} devices"
        )
    names = _schedule_names(schedule)
    counts = _micro_batches(profile, micro_batches)
    groups = _stage_counts(stages, len(cluster), len(profile.layers))
    settings = [
        _Setting(profile, cluster, costs, name)
        for costs in (ChainCosts(profile, count, cluster.link) for count in counts)
        for name in names
    ]
    for group in groups:
        plans = [made for setting in settings for count in group if (made := setting.best_plan(count))]
        if plans:
            return _best(plans)
    misfits = [setting.misfit(count) for setting in settings for group in groups for count in group]
    raise min(misfits, key=lambda misfit: misfit.short_bytes or math.inf)


def micro_batches_worth_trying(batch: int, stages: int) -> list[int]:
    """Numbers of micro-batches to measure for a mini-batch of ``batch`` samples: more idle less, but cost more each.

    As many as stages, twice and four times that; where there are enough samples each part has two at least, as a
    BatchNorm needs.

    >>> micro_batches_worth_trying(64, stages=2), micro_batches_worth_trying(8, stages=2)
    ([2, 4, 8], [2, 4])
    """
    most = max(batch // 2, min(batch, stages))
    return sorted({min(most, stages * factor) for factor in (1, 2, 4)})


def _best(plans: Sequence[Plan]) -> Plan:
    """The fastest; of those that no measurement could tell from it, the one that needs the least memory."""
    fastest = min(made.predicted.step_seconds for made in plans)
    near = [made for made in plans if made.predicted.step_seconds <= fastest * (1 + _INDISTINGUISHABLE)]
    return min(near, key=lambda made: (max(made.predicted.memory_bytes), made.predicted.step_seconds))


class _Setting:
    """One schedule at one number of micro-batches: makes the best plan of so many stages, or says why there is none."""

    def __init__(self, profile: Profile, cluster: Cluster, costs: ChainCosts, schedule: str) -> None:
        self._profile, self._cluster, self._costs, self._schedule = profile, cluster, costs, schedule
        self._sites = [Site(device.speed, device.memory_bytes or math.inf) for device in cluster.devices]
        # By the number of stages from a stage to the end, from 1 on: all that it depends on in these schedules.
        self._in_flight = [
            schedules.in_flight(schedules.build(schedule, devices=left, micro_batches=costs.micro_batches))[0]
            for left in range(1, len(cluster) + 1)
        ]

    def best_plan(self, stages: int) -> Plan | None:
        """The plan with the smallest bottleneck, None where none fits."""
        cut = best_cut(self._costs.rows(), self._costs.layers, self._sites, stages, self._in_flight)
        if cut is None:
            return None
        draft = Plan(
            stages=tuple(self._stages(cut)),
            cluster=self._cluster,
            schedule=self._schedule,
            micro_batches=self._costs.micro_batches,
            fingerprint=self._profile.fingerprint,
            outputs=self._profile.outputs,
        )
        return draft.model_copy(update={"prediction": self._predict(draft)})

    def misfit(self, stages: int) -> DoesNotFit:
        """Why no plan has so many stages, told by the cut that comes nearest."""
        cut = best_cut(self._costs.rows(), self._costs.layers, self._sites, stages, self._in_flight, shortage)
        if cut is None:
            return DoesNotFit(
                f"no cut into {stages} stages is possible: layers that share parameters or buffers stay in one stage",
                0,
                0,
            )
        devices = [self._cluster.devices[site] for site in cut.sites]
        lacking = [
            (stage.memory_bytes - (device.memory_bytes or math.inf), index, stage, device)
            for index, (stage, device) in enumerate(zip(self._stages(cut), devices, strict=True))
        ]
        short, index, stage, device = max(lacking, key=lambda entry: entry[0])
        return DoesNotFit(
            f"the model does not fit: with {stages} stages, {self._costs.micro_batches} micro-batches and schedule "
            f"{self._schedule!r}, stage {index} (layers {stage.layers[0]} to {stage.layers[-1]}) on {device.name} is "
            f"short by {int(short)} bytes at best: it needs {stage.memory_bytes} ({format_bytes(stage.memory_bytes)}: "
            f"{format_bytes(stage.static_bytes)} of parameters, gradients and optimizer state, {stage.in_flight} x "
            f"{format_bytes(stage.stash_bytes)} kept for backward, {format_bytes(stage.transient_bytes)} for a "
            f"while) and has {device.memory_bytes} ({format_bytes(device.memory_bytes or 0)}). "
            "Use more or larger devices, or more and so smaller micro-batches",
            stage=index,
            short_bytes=int(short),
        )

    def _stages(self, cut: ChainCut) -> list[StagePlan]:
        costs = self._costs
        stages = []
        for index, layers in enumerate(stage_slices(cut.starts, costs.layers)):
            device = self._cluster.devices[cut.sites[index]]
            stages.append(
                StagePlan(
                    layers=tuple(info.name for info in self._profile.layers[layers]),
                    device=device.name,
                    forward_seconds=costs.forward[layers].sum() / device.speed,
                    backward_input_seconds=costs.backward_input[layers].sum() / device.speed,
                    backward_weight_seconds=costs.backward_weight[layers].sum() / device.speed,
                    transfer_seconds=float(
                        costs.border_seconds[layers.start] + costs.border_seconds[layers.stop]
                    ),
                    output_bytes=int(costs.output_bytes[layers.stop - 1]),
                    static_bytes=int(costs.static_bytes[layers].sum()),
                    stash_bytes=costs.stash_bytes(layers),
                    transient_bytes=int(
                        costs.peak_bytes[layers].max() + costs.arriving_bytes[layers.stop - 1]
                    ),
                    in_flight=self._in_flight[len(cut.starts) - index - 1],
                )
            )
        return stages

    def _predict(self, draft: Plan) -> Prediction:
        timeline = draft.simulate()
        held = dict.fromkeys((device.name for device in self._cluster.devices), 0)
        for stage in draft.stages:
            held[stage.device] += stage.memory_bytes
        return Prediction(
            step_seconds=timeline.makespan,
            memory_bytes=tuple(held.values()),
            bubble=timeline.bubble,
            bottleneck_seconds=max(stage.load_seconds for stage in draft.stages),
            serial_seconds=float(self._costs.seconds.sum()) * draft.micro_batches,
        )


def _stage_counts(stages: int | Literal["auto"] | None, devices: int, layers: int) -> list[list[int]]:
    """Groups of numbers of stages to try; a group is only tried where none before it has a cut that fits."""
    most = min(devices, layers)
    if stages is None:
        return [[count] for count in range(most, 0, -1)]
    if stages == "auto":
        return [list(range(1, most + 1))]
    if isinstance(stages, bool) or not isinstance(stages, int) or not 1 <= stages <= most:
        raise ValueError(
            f"stages must be between 1 and {most} ({devices} devices, {layers} layers), got {stages!r}"
        )
    return [[stages]]


def _schedule_names(schedule: str) -> Sequence[str]:
    if schedule == "auto":
        return SCHEDULES[:2]
    if schedule not in SCHEDULES:
        raise ValueError(
            f"no plan is made for schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}, or 'auto'"
        )
    return (schedule,)


def _micro_batches(profile: Profile, micro_batches: int | Literal["auto"]) -> list[int]:
    if micro_batches == "auto":
        return [costs.micro_batches for costs in profile.costs]
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1 or 'auto', got {micro_batches!r}")
    return [profile.at(micro_batches).micro_batches]
