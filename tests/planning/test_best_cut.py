"""The cut of a plan is the best there is, and a byte decides what fits: against every cut, order and mode there is."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import schedules
from pipepart import Cluster, Device, Plan, Profile
from pipepart.planning.infeasible import Infeasible
from pipepart.planning.plans.options import PlanOptions
from pipepart.planning.request import ASYNCHRONOUS, CHUNKS, read_request
from pipepart.planning.search.candidate import candidates_of
from pipepart.planning.search.cut_search import CutSearch
from pipepart.planning.search.parts import parts_of
from pipepart.units import counted
from schedules import Kind, Schedule
from tests.planning.held import Held, Moment, held_by, moments, peak
from tests.planning.problems import Layer, chains, clusters, profile_of

MODES = {"auto": ("never", "except-last", "always")}


@dataclass(frozen=True)
class Way:
    """A cut on an order of devices: the largest load, and the most that a device lacks (negative where it fits)."""

    edges: tuple[int, ...]
    devices: tuple[int, ...]
    bottleneck: float
    shortage: float


def again_as(schedule: Schedule, mode: str) -> Schedule:
    """The schedule with the forwards that all stages repeat in a mode."""
    count = {"never": 0, "except-last": schedule.micro_batches - 1, "always": schedule.micro_batches}[mode]
    return schedules.insert_recompute(schedule, range(schedule.stages), range(count)) if count else schedule


def older_versions(schedule: Schedule, stage: int) -> int:
    """The most versions of a stage's weights that are there after one of its steps, the newest left out.

    A version is there from the step that makes it to the last action of a micro-batch that uses it.
    """
    if not schedule.versions:
        return 0
    row = [action for action in schedule.actions[schedule.device_of[stage]] if action.stage == stage]
    steps = [place for place, action in enumerate(row) if action.kind is Kind.OPT_STEP]
    made = [-1, *steps]
    last = [
        max(
            (
                place
                for place, action in enumerate(row)
                if action.kind is not Kind.OPT_STEP
                and schedule.versions[stage][action.micro_batch or 0] == version
            ),
            default=-1,
        )
        for version in range(len(made))
    ]
    return max(sum(made[v] < step < last[v] for v in range(len(made))) for step in steps)


INPUT_BYTES = 7


def every_way(
    layers: Sequence[Layer],
    cluster: Cluster,
    schedule: Schedule,
    modes: Sequence[str],
    loss_seconds: float = 0.0,
) -> Iterator[Way]:
    """Every cut, order of devices and choice of what each device makes again."""
    rows = [schedule.stages_of(row) for row in range(schedule.devices)]

    @cache
    def parts_of(start: int, end: int) -> Held:
        return held_by(layers, start, end, INPUT_BYTES)

    @cache
    def moments_of(row: int, mode: str) -> list[dict[int, Moment]]:
        return moments(again_as(schedule, mode), row)

    @cache
    def choices(row: int, pieces: tuple[tuple[int, int], ...]) -> list[tuple[int, float]]:
        """Bytes and seconds of a device for each mode."""
        parts = [parts_of(*piece) for piece in pieces]
        loss = loss_seconds if pieces[-1][1] == len(layers) else 0.0
        seconds = sum(_seconds(layers[start:end]) for start, end in pieces) + loss
        again = sum(
            sum(layer.forward for layer in layers[start:end]) + (loss if end == len(layers) else 0.0)
            for (start, end), own in zip(pieces, parts, strict=True)
            if own.backward
        )
        stages = dict(zip(rows[row], parts, strict=True))
        older = {stage: older_versions(schedule, stage) for stage in stages}
        found = []
        for mode in modes:
            need = peak(moments_of(row, mode), stages, older)
            found.append((need, seconds + (again if mode != "never" else 0.0)))
        return found

    for inner in itertools.combinations(range(1, len(layers)), schedule.stages - 1):
        if any(_parts_sharers(layers, border) for border in inner):
            continue
        edges = (0, *inner, len(layers))
        pieces = list(itertools.pairwise(edges))
        for order in itertools.permutations(range(len(cluster)), schedule.devices):
            loads = _borders(layers, cluster, schedule, inner, order)
            lacks = []
            for row, site in enumerate(order):
                device = cluster.devices[site]
                limit = math.inf if device.memory_bytes is None else device.memory_bytes
                found = choices(row, tuple(pieces[stage] for stage in rows[row]))
                lacks.append(min(need for need, _ in found) - limit)
                fitting = [seconds for need, seconds in found if need <= limit]
                loads[row] += min(fitting, default=math.inf) / schedule.micro_batches / device.speed
            yield Way(edges, order, max(loads), max(lacks))


def _seconds(layers: Sequence[Layer]) -> float:
    return sum(one.forward + one.backward_input + one.backward_weight for one in layers)


def _parts_sharers(layers: Sequence[Layer], border: int) -> bool:
    return any(other < border <= index for index, layer in enumerate(layers) for other in layer.shares_with)


def _borders(
    layers: Sequence[Layer], cluster: Cluster, schedule: Schedule, inner: Sequence[int], order: Sequence[int]
) -> list[float]:
    """What each device has to send and to receive."""
    loads = [0.0] * len(order)
    for border, (one, other) in zip(inner, itertools.pairwise(schedule.device_of), strict=True):
        if one == other:
            continue
        link = cluster.link_between(*(cluster.devices[order[row]].name for row in (one, other)))
        trained = any(layer.trained and layer.parameters for layer in layers[:border])
        for row in (one, other):
            loads[row] += (1 + trained) * link.seconds(layers[border - 1].output)
    return loads


def partitioned(profile: Profile, cluster: Cluster, **options: Any) -> Plan | Infeasible:
    """Return the plan with the smallest bottleneck (with several stages a device: the shortest step), or why not."""
    (part,) = parts_of(read_request(profile, cluster, PlanOptions(**options)))
    candidate = candidates_of(part)[0]
    if candidate.impossible_reason:
        return CutSearch(candidate).explain()
    if candidate.chunks > 1:
        best = CutSearch(candidate).best_cut()
        return candidate.plan_of(best.borders, best.order) if best else CutSearch(candidate).explain()
    cut = CutSearch(candidate).smallest_bottleneck()
    if cut is None:
        return CutSearch(candidate).explain()
    return CutSearch(candidate).with_bound(candidate.plan_of(cut.first_layers[1:], cut.device_indices))


def check_against_every_way(
    layers: Sequence[Layer],
    cluster: Cluster,
    schedule: Schedule,
    recompute: str,
    chunks: int = 1,
    loss_seconds: float = 0.0,
) -> None:
    """The plan has the smallest bottleneck of all that fit; if none does, the reason has the bytes that are missing.

    With several stages a device there is a plan if a cut fits, and no bottleneck is promised.
    """
    ways = list(every_way(layers, cluster, schedule, MODES.get(recompute, (recompute,)), loss_seconds))
    found = partitioned(
        profile_of(layers, [schedule.micro_batches], loss_seconds, INPUT_BYTES),
        cluster,
        schedule=schedule.name,
        stages=schedule.stages,
        recompute=recompute,
        chunks=chunks if chunks > 1 else None,
    )
    fitting = [way.bottleneck for way in ways if way.shortage <= 0]
    if fitting:
        assert isinstance(found, Plan)
        assert found.predicted.bottleneck_bound <= min(fitting) * (1 + 1e-12)
        if chunks == 1:
            assert found.predicted.bottleneck_seconds == pytest.approx(min(fitting), rel=1e-12, abs=1e-12)
            assert found.predicted.bottleneck_optimal
        if found.fits:
            check_memory(found)
        else:  # more messages wait in its own step than if all stages took equal times
            limits = {device.name: device.memory_bytes or math.inf for device in cluster.devices}
            step = found.device_bytes(found.simulate())
            assert any(need > limits[name] for name, need in step.items())
        return
    assert isinstance(found, Infeasible)
    if not ways:  # layers that share a parameter leave no border
        return
    least = min(way.shortage for way in ways)
    assert found.deficit_bytes >= least
    proven = "at best" if found.deficit_bytes == least else "in the best cut found"
    assert f"short by {counted(found.deficit_bytes, 'byte')} {proven}" in found.text


def check_memory(plan: Plan) -> None:
    """No device holds more than it has, counted by the search, by the plan, and by its simulation."""
    held = plan.device_bytes()
    for device, size in zip(plan.cluster.devices, plan.predicted.memory_bytes, strict=True):
        assert device.memory_bytes is None or size <= device.memory_bytes
        assert held.get(device.name, 0) == size
    if plan.chunks == 1:
        assert {stage.device: stage.memory_bytes for stage in plan.stages} == held
    assert plan.refreshed() is plan  # computed anew, as where it is read from a file, all is the same


def least_shortage(layers: Sequence[Layer], cluster: Cluster, schedule: Schedule, recompute: str) -> float:
    """What the way that comes nearest lacks; negative where it has more than it needs."""
    ways = every_way(layers, cluster, schedule, MODES.get(recompute, (recompute,)))
    return min((way.shortage for way in ways), default=math.inf)


def enlarged(cluster: Cluster, by: int) -> Cluster:
    """The cluster with ``by`` bytes more on each device that has a limit."""
    devices = [
        device.model_copy(update={"memory_bytes": device.memory_bytes and device.memory_bytes + by})
        for device in cluster.devices
    ]
    return cluster.model_copy(update={"devices": tuple(devices)})


ALONE = [*(name for name, chunks in CHUNKS.items() if chunks is None), *ASYNCHRONOUS]
TOGETHER = [name for name, chunks in CHUNKS.items() if chunks is not None]

alone = {
    "layers": chains(most=5, sharing=True),
    "cluster": clusters(),
    "name": st.sampled_from(ALONE),
    "micro_batches": st.integers(1, 8),
    "recompute": st.sampled_from(["auto", "auto", "never", "except-last", "always"]),
    "stages": st.integers(1, 4),
    "loss_seconds": st.sampled_from([0.0, 3.0]),
    "spare": st.one_of(st.none(), st.integers(-2, 2)),
}
together = {**alone, "layers": chains(most=6), "cluster": clusters(most=3), "name": st.sampled_from(TOGETHER)}


def check(layers, cluster, name, micro_batches, recompute, stages, loss_seconds, spare, chunks=1) -> None:
    """Check the plan for the memory as drawn, or for ``spare`` bytes more than the least that allows one."""
    devices = min(stages, len(layers) // chunks, len(cluster))
    assume(devices >= chunks)
    try:
        built = schedules.build(name, devices=devices, micro_batches=micro_batches, chunks=chunks)
    except schedules.ScheduleError:
        assume(False)
        return
    if spare is not None:
        least = least_shortage(layers, cluster, built, recompute)
        assume(abs(least) < 10**6)
        more = int(least) + spare
        assume(all(d.memory_bytes is None or d.memory_bytes + more > 0 for d in cluster.devices))
        cluster = enlarged(cluster, more)
    check_against_every_way(layers, cluster, built, recompute, chunks, loss_seconds)


def sized(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


# A layer that has only the weight of an earlier one, and so keeps nothing from I to W.
only_shared = {
    "layers": [
        Layer(saved=5, waiting=3, parameters=2, keeps_input=True, output=4),
        Layer(backward_input=0.0, backward_weight=1.0, waiting=20, shares_with=(0,)),
    ],
    "cluster": Cluster(devices=(Device(name="device:0", kind="made up", memory_bytes=1),)),
    "name": "zb-h1",
    "micro_batches": 2,
    "recompute": "never",
    "stages": 1,
    "loss_seconds": 0.0,
}


@given(**alone)
@example(**only_shared, spare=0)
@example(**only_shared, spare=-1)
@sized(30)
def test_no_way_that_fits_has_a_smaller_bottleneck(**drawn):
    check(**drawn)


@given(**together)
@sized(10)
def test_a_plan_with_several_stages_a_device_is_found_where_one_fits(**drawn):
    check(**drawn, chunks=2)


@pytest.mark.slow
@given(**alone)
@sized(250)
def test_no_way_of_thousands_has_a_smaller_bottleneck(**drawn):
    check(**drawn)


@pytest.mark.slow
@given(**together)
@sized(100)
def test_many_plans_with_several_stages_a_device_are_found_where_one_fits(**drawn):
    check(**drawn, chunks=2)
