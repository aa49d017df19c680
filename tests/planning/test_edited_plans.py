"""Files that were edited into another plan: it costs what its layers cost, and no more is claimed of it."""

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import schedules
from pipepart import Cluster, Plan
from pipepart.planning import StagePlan
from pipepart.units import counted
from schedules import Kind
from tests.planning.held import Held, held_by, moments, peak, step_of
from tests.planning.problems import Layer, chains, clusters, profile_of
from tests.planning.test_plan_files import Data, costs, edited, move, tied_plan


@pytest.fixture(scope="module")
def tied() -> Plan:
    return tied_plan()


def test_figures_in_the_file_are_not_believed(tied, tmp_path):
    def change(data: Data) -> None:
        for stage in data["stages"]:
            stage.update(
                forward_seconds=1e-9, static_bytes=0, stash_bytes=0, full_stashes=0, transfer_seconds=0.0
            )
        data["prediction"].update(step_seconds=1e-9, bubble=0.0, memory_bytes=[0, 0, 0])

    read = Plan.load(edited(tied, change, tmp_path / "plan.json"))
    assert read.stages == tied.stages
    assert read.predicted.step_seconds == tied.predicted.step_seconds
    assert read.predicted.memory_bytes == tied.predicted.memory_bytes


BOUND_EDITS: dict[str, Callable[[Data], object]] = {
    "the border": lambda d: move(d, 0, 1),
    "the speed of a device that is not used": lambda d: d["cluster"]["devices"][2].update(speed=9.0),
    "a cost": lambda d: costs(d)["layers"][0]["forward"].update(seconds=0.5),
    "the bound beyond the cut": lambda d: d["prediction"].update(bottleneck_bound=1e6),
}


@pytest.mark.parametrize("edit", BOUND_EDITS)
def test_of_an_edited_plan_no_best_and_no_runners_up_are_known(edit, tied, tmp_path):
    assert tied.predicted.bottleneck_bound > 0
    assert tied.alternatives
    read = Plan.load(edited(tied, BOUND_EDITS[edit], tmp_path / "plan.json"))
    assert read.predicted.bottleneck_bound == 0
    assert not read.predicted.bottleneck_optimal
    assert read.alternatives == ()


def needs(plan: Plan, held: list[Held], step: schedules.Timeline) -> dict[str, int]:
    """Bytes of each device at its peak, in the step or if all stages take equal times."""
    built = plan.build_schedule()
    found = {}
    for row in range(built.devices):
        stages = {stage: held[stage] for stage in built.stages_of(row)}
        name = plan.stages[min(stages)].device
        found[name] = max(peak(moments(built, row, times), stages, {}) for times in (step, None))
    return found


# Stages a device, and the schedules that have them.
SCHEDULES = {
    1: ["1f1b", "gpipe", "sequential", "eager-1f1b", "zb-h1", "zb-h2"],
    2: ["interleaved-1f1b", "looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v"],
}


@st.composite
def by_hand(draw: st.DrawFn, layers: list[Layer], cluster: Cluster, chunks: int) -> Plan:
    """Any cut, order of devices, schedule and recompute, and devices that may be too small."""
    count, micro_batches = draw(st.integers(2, min(len(cluster), len(layers) // 2))), draw(st.integers(1, 5))
    schedule = draw(st.sampled_from(SCHEDULES[chunks]))
    rows = schedules.build(schedule, count, micro_batches, chunks).device_of
    edges = [0, *sorted(draw(st.permutations(range(1, len(layers))))[: len(rows) - 1]), len(layers)]
    order = draw(st.permutations(cluster.devices))
    limits = draw(st.sampled_from([st.none(), st.one_of(st.none(), st.integers(400, 2000))]))
    devices = tuple(device.model_copy(update={"memory_bytes": draw(limits)}) for device in cluster.devices)
    stages = tuple(
        StagePlan(
            layers=tuple(f"layer{index}" for index in range(*span)),
            device=order[row].name,
            recompute=draw(st.sampled_from(["never", "except-last", "always"])),
        )
        for row, span in zip(rows, itertools.pairwise(edges), strict=True)
    )
    return Plan(
        stages=stages,
        cluster=cluster.model_copy(update={"devices": devices}),
        schedule=schedule,
        micro_batches=micro_batches,
        chunks=chunks,
        profile=profile_of(layers, [micro_batches], loss_seconds=0.5, input_bytes=7),
    )


@pytest.mark.parametrize("chunks", SCHEDULES)
@given(
    layers=chains(least=4, most=12),
    cluster=clusters(limited=False).filter(lambda cluster: len(cluster) > 1),
    data=st.data(),
)
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_a_plan_of_any_stages_costs_what_its_layers_cost(chunks, layers, cluster, data, tmp_path):
    raw = data.draw(by_hand(layers, cluster, chunks))
    raw.save(path := tmp_path / "plan.json")
    edges = list(itertools.accumulate((len(stage.layers) for stage in raw.stages), initial=0))
    built = raw.build_schedule()
    names = [raw.stages[built.stages_of(row)[0]].device for row in range(built.devices)]
    timeline = step_of(layers, edges, built, raw.cluster, names, loss_seconds=0.5)
    held = [held_by(layers, *span, input_bytes=7) for span in itertools.pairwise(edges)]
    bytes_ = needs(raw, held, timeline)
    limits = {device.name: device.memory_bytes or math.inf for device in raw.cluster.devices}
    short = [name for name, need in bytes_.items() if need > limits[name]]
    if short:
        with pytest.raises(ValueError, match=r"plan\.json holds a plan that does not fit") as caught:
            Plan.load(path)
        for name, need in bytes_.items():
            text = f"device {name!r} (stage"
            assert (text in str(caught.value)) == (name in short)
            if name in short:
                assert f"is short by {counted(int(need - limits[name]), 'byte')}: it needs {need} " in str(
                    caught.value
                )
        return
    read = Plan.load(path)
    assert read.predicted.step_seconds == pytest.approx(timeline.makespan, rel=1e-9)
    assert read.predicted.bubble == pytest.approx(timeline.bubble, abs=1e-9)
    assert dict(zip(limits, read.predicted.memory_bytes, strict=True)) == dict.fromkeys(limits, 0) | bytes_
    assert read.simulate().makespan == read.predicted.step_seconds
    order = schedules.build(
        read.schedule, devices=len(read.workers), micro_batches=read.micro_batches, chunks=chunks
    )
    assert [stage.in_flight for stage in read.stages] == in_flight(order)
    read.save(path)
    assert Plan.load(path) == read


def in_flight(order: schedules.Schedule) -> list[int]:
    """Return the most micro-batches of each stage between their forward and the end of their backward."""
    peaks, now = [0] * order.stages, [0] * order.stages
    for row in order.leaves:
        for kind, stage, *_ in row:
            now[stage] += (kind is Kind.F) - (kind in (Kind.B, Kind.W))
            peaks[stage] = max(peaks[stage], now[stage])
    return peaks
