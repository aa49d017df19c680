"""Candidate: a schedule, a number of devices, stages per device and recompute modes, for which cuts are evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

import schedules

from ...cluster import Cluster
from ...units import counted, format_seconds
from ..costs.cut_costs import Borders, CutCosts
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODE_SETS, Floats, Ints, Mode, ModeChoice, StashCounts, with_modes
from ..plans.plan import Plan
from ..request import ASYNCHRONOUS, BIDIRECTIONAL, DEFERRING
from .parts import FEW_DEVICES, Part
from .step_times import Levels, StepTimes, has_bandwidth

# Estimated CPU seconds to evaluate and plan a candidate: per action of a stage and micro-batch, under schedules with
# several stages per device, and under the schedules whose order a search finds; per stage; per replica; per layer and
# stage; with memory limits, and then per layer and edge of the device-state graph.
_ACTION_SECONDS, _CHUNKED_ACTION_SECONDS, _SEARCHED_ACTION_SECONDS = 70e-6, 130e-6, 500e-6
_STAGE_SECONDS = 2e-3
_PLAN_SECONDS = 5e-3
_LAYER_RANGE_SECONDS = 50e-6
_TYPICAL_SHARE = 0.5  # of the estimates above, which keep a time limit on slow machines, too
_LIMITED_SECONDS = 0.03
_EDGE_SECONDS = 0.8e-6
_SEARCHED = ("v-half", "v-min")
_MOST_DEVICE_COUNTS = 24  # numbers of devices to try for each schedule


@dataclass(frozen=True, eq=False)
class Candidate:
    """A choice of schedule, devices and recompute modes. It evaluates cuts, and makes the plan of a cut.

    Attributes:
        part: the part of the request: the layers, the devices, and the number of micro-batches.
        schedule: the name of the schedule.
        chunks: stages per device.
        devices: the number of devices of one replica.
        choice: the modes that stages may use.
    """

    part: Part
    schedule: str
    chunks: int
    devices: int
    choice: ModeChoice

    @property
    def cluster(self) -> Cluster:
        """The devices for the stages of one replica."""
        return self.part.groups.cluster

    @property
    def stages(self) -> int:
        """The number of stages of one replica."""
        return self.devices * self.chunks

    @property
    def costs(self) -> ChainCosts:
        """The costs of the layers."""
        return self.part.costs

    @property
    def simulation_seconds(self) -> float:
        """Estimated CPU seconds to plan the candidate, without the search for cuts: the clock ends that search."""
        per_action = _ACTION_SECONDS if self.chunks == 1 else _CHUNKED_ACTION_SECONDS
        per_action = _SEARCHED_ACTION_SECONDS if self.schedule in _SEARCHED else per_action
        seconds = self.stages * (self.part.micro_batches * per_action + _STAGE_SECONDS)
        return seconds + _PLAN_SECONDS * (1 + self.part.groups.replicas)

    @property
    def too_slow(self) -> str:
        """The explanation for a request that has no time for it."""
        counts = (
            f"{counted(self.stages, 'stage')} and {counted(self.part.micro_batches, 'micro-batch', 'es')}"
        )
        return f"to plan {counts} takes about {format_seconds(self.simulation_seconds)}"

    @property
    def effort_seconds(self) -> float:
        """Estimated CPU seconds to plan the candidate, with the search for cuts."""
        seconds = self.simulation_seconds + self.stages * self.costs.layers * _LAYER_RANGE_SECONDS
        seconds *= _TYPICAL_SHARE
        if not self.is_limited:
            return seconds
        seconds += _LIMITED_SECONDS
        if not self.is_plain:
            return seconds
        return seconds + self.part.spaces.edges(self.devices) * self.costs.layers * _EDGE_SECONDS

    @property
    def bound(self) -> float:
        """A lower bound in seconds of the step of every plan of this candidate."""
        return self.part.least_seconds(self.devices)

    @property
    def likely_step(self) -> float:
        """Estimated seconds of its step, to try likely fast candidates first: equal stages plus the pipeline bubble."""
        bubble = 1 / 3 if self.schedule in DEFERRING else 1.0
        return self.bound * (1 + bubble * (self.devices - 1) / (self.part.micro_batches * self.chunks))

    @cached_property
    def impossible_reason(self) -> str:
        """Why no cut is possible even with unlimited memory; empty if no reason is known."""
        stages, groups = self.stages, self.part.groups
        if self.chunks > 1 and self.devices == 1:
            return "several stages on a single device gain nothing"
        if stages > self.costs.layers:
            return f"{stages} stages, and the model has {self.costs.layers} layers"
        if groups.replicas > self.costs.micro_batches:
            return (
                f"{counted(self.costs.micro_batches, 'micro-batch', 'es')} cannot be shared by "
                f"{groups.replicas} replicas of the model"
            )
        if groups.replicas > 1 and self.schedule in ASYNCHRONOUS:
            return "it is asynchronous: replicas would have to agree on their weights within a step"
        try:
            _ = self.bare_schedule
        except schedules.ScheduleError as error:
            return str(error)
        return ""

    @property
    def has_cuts(self) -> bool:
        """True if there are enough allowed borders for a cut into this many stages."""
        return len(self.costs.allowed_borders) >= self.stages - 1

    def evaluate(self, borders: Borders, orders: Ints) -> tuple[Floats, Floats]:
        """Return the largest memory deficit of any device in bytes, [cuts], and the seconds of a step, [cuts].

        Args:
            borders: the first layer of each stage but the first: [cuts, borders].
            orders: the device of each schedule row, by its position in the cluster: [cuts, rows].
        """
        modes, deficits = self.cut_costs.memory(borders, orders)
        return deficits, self.step_times.of(borders, modes, orders)

    @cached_property
    def bare_schedule(self) -> schedules.Schedule:
        """The schedule of one replica, without recomputes."""
        name, devices, micro_batches, chunks = self.structure
        return self.part.once(
            ("schedule", self.structure),
            lambda: schedules.build(name, devices=devices, micro_batches=micro_batches, chunks=chunks),
        )

    @cached_property
    def cut_costs(self) -> CutCosts:
        """Computes the memory and modes of cuts. The mode of a stage does not affect the stash counts of the others."""
        # Without memory limits the fastest mode always fits.
        modes = MODE_SETS[self.choice][: None if self.is_limited else 1]
        bare = self.bare_schedule
        summed = self.part.summed_replicas * bare.replicas
        counts: dict[Mode, StashCounts] = {
            mode: self.part.once(
                ("counts", self.structure, mode),
                lambda mode=mode: StashCounts(with_modes(bare, [mode]), replicas=summed),
            )
            for mode in modes
        }
        return CutCosts(self.costs, self.cluster, bare.device_of, counts, bare.replicas)

    @cached_property
    def step_times(self) -> StepTimes:
        """Simulates one step of one replica for many cuts at once."""
        key = "levels", self.structure, self.cut_costs.may_recompute
        recompute, on_links = self.cut_costs.may_recompute, has_bandwidth(self.cluster)
        levels = self.part.once(key, lambda: Levels(self.bare_schedule, self.part.scale, recompute, on_links))
        return StepTimes(self.cut_costs, levels)

    @property
    def is_plain(self) -> bool:
        """True if each device runs one stage; the dynamic program then finds the smallest bottleneck."""
        return self.chunks == 1 and self.schedule not in BIDIRECTIONAL

    @property
    def is_limited(self) -> bool:
        """True if a plan may need more memory than a device has."""
        return self.part.is_limited

    @property
    def rows(self) -> tuple[int, ...]:
        """The schedule row of each stage of the first copy of the model."""
        return self.bare_schedule.device_of[: self.stages]

    @property
    def structure(self) -> tuple[str, int, int, int]:
        """The arguments of its schedule: name, devices, micro-batches, stages per device."""
        return self.schedule, self.devices, self.part.micro_batches, self.chunks

    def plan_of(self, borders: Sequence[int], order: Sequence[int]) -> Plan:
        """Return the plan of a cut, even if it does not fit.

        Args:
            borders: the first layer of each stage but the first.
            order: the device of each schedule row, by its position in the cluster.
        """
        table = np.array([borders], dtype=np.int64).reshape(1, -1)
        modes = self.cut_costs.stage_modes(table, np.array([order]))
        devices = [order[row] for row in self.rows]
        return self.part.plan_of(borders, devices, modes, schedule=self.schedule, chunks=self.chunks)


def candidates_of(part: Part) -> list[Candidate]:
    """Return the candidates for every named schedule, set of modes and number of devices, the simplest first."""
    request, layers = part.request, len(part.profile.layers)
    least, most = part.least_devices, part.most_devices
    candidates = []
    for name, choice in product(request.schedules, request.mode_choices):
        chunks = request.chunks_of(name)
        if chunks is None:
            continue
        numbers = _device_numbers(most, layers)
        if request.stages != "auto":
            devices, rest = divmod(request.stages, chunks)
            numbers = [devices] if not rest and 0 < devices <= most else []
        numbers = [count for count in numbers if count >= least]
        possible = [count for count in numbers if count * chunks <= layers and (count > 1 or chunks == 1)]
        if not possible and part.computing is None:
            possible = numbers[:1]  # an impossible candidate tells the reason
        candidates += [Candidate(part, name, chunks, devices, choice) for devices in possible]
    return candidates


def _device_numbers(most: int, layers: int) -> list[int]:
    """Return numbers of devices to try, up to ``most``, the largest first.

    They are all numbers up to four, the largest two, and each number that makes equal stages have fewer layers than one
    device less would. The latter are about as many as the square root of the number of layers.
    """
    steps = {-(-layers // layers_per_stage) for layers_per_stage in range(1, layers + 1)}
    few = range(1, min(most, FEW_DEVICES) + 1)
    numbers = {most, max(most - 1, 1), *few, *(number for number in steps if number < most)}
    if len(numbers) > _MOST_DEVICE_COUNTS:
        numbers = {*sorted(numbers)[:: -(-len(numbers) // _MOST_DEVICE_COUNTS)], most}
    return sorted(numbers, reverse=True)
