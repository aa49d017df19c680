"""Files that were edited into another plan: it costs what its layers cost, and no more is claimed of it."""

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
import schedules
from pipepart import Plan
from pipepart.units import counted
from schedules import Kind
from tests.planning.held import held_by, moments, peak
from tests.planning.plan_edits import Data, costs, edited, move, tied_plan
from tests.planning.problems import Layer, chains, clusters, profile_of


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


def from_scratch(
    plan: Plan, layers: list[Layer], loss_seconds: float, input_bytes: int
) -> schedules.Timeline:
    """The step of a plan, simulated with costs added up layer by layer."""
    ends, seconds, stashes, inputs, waiting = [], [], [], [], []
    start = 0
    for stage in plan.stages:
        end = start + len(stage.layers)
        speed = plan.cluster.device(stage.device).speed
        own = layers[start:end]
        count = plan.micro_batches
        loss = loss_seconds if end == len(layers) else 0.0
        seconds.append(
            [
                (sum(layer.forward for layer in own) + loss) / count / speed,
                sum(layer.backward_input for layer in own) / count / speed,
                sum(layer.backward_weight for layer in own) / count / speed,
            ]
        )
        held = held_by(layers, start, end, input_bytes)
        stashes.append(held.stash)
        waiting.append(held.waiting)
        inputs.append(layers[start - 1].output if start else input_bytes)
        ends.append(end)
        start = end
    built = plan.build_schedule()
    names = {row: plan.stages[stage].device for stage, row in enumerate(built.device_of)}
    rows = [[plan.cluster.link_between(names[a], names[b]) for b in sorted(names)] for a in sorted(names)]
    again = [stage.recompute != "never" for stage in plan.stages]
    stage_costs = schedules.StageCosts(
        forward=[each[0] for each in seconds],
        backward_input=[each[1] for each in seconds],
        backward_weight=[each[2] for each in seconds],
        latency=[[link.latency for link in row] for row in rows],
        bandwidth=[[link.bandwidth or math.inf for link in row] for row in rows],
        message_bytes=[layers[end - 1].output for end in ends],
        stash_bytes=stashes,
        weight_stash_bytes=waiting,
        boundary_bytes=[size if more else 0 for size, more in zip(inputs, again, strict=True)],
        recompute=[each[0] if more else 0.0 for each, more in zip(seconds, again, strict=True)],
    )
    return schedules.simulate(built, stage_costs, contention=True)


def needs(plan: Plan, layers: list[Layer], input_bytes: int, step: schedules.Timeline) -> dict[str, int]:
    """Bytes of each device at its peak, in the step or if all stages take equal times."""
    built = plan.build_schedule()
    ends = list(itertools.accumulate(len(stage.layers) for stage in plan.stages))
    held = [held_by(layers, start, end, input_bytes) for start, end in itertools.pairwise([0, *ends])]
    found = {}
    for row in range(built.devices):
        own = built.stages_of(row)
        name = plan.stages[own[0]].device
        stages = {stage: held[stage] for stage in own}
        found[name] = max(peak(moments(built, row, times), stages, {}) for times in (step, None))
    return found


@st.composite
def edits(draw: st.DrawFn, plan: Plan) -> Callable[[Data], None]:
    """A few edits that leave a plan possible but for the memory: borders, devices, recompute, schedule, limits."""
    one_a_device = ["1f1b", "gpipe", "sequential", "eager-1f1b", "zb-h1", "zb-h2"]
    alike = ["interleaved-1f1b", "looped-bfs"]
    there_and_back = ["zb-v", "v-half", "v-min", "dualpipe-v"]
    kinds = next(
        kind for kind in (one_a_device, alike, there_and_back, [plan.schedule]) if plan.schedule in kind
    )
    names = [name for stage in plan.stages for name in stage.layers]
    count = len(plan.stages)
    borders = sorted(draw(st.permutations(range(1, len(names))))[: count - 1])
    rows = plan.build_schedule().device_of
    order = draw(st.permutations([device.name for device in plan.cluster.devices]))
    modes = draw(
        st.lists(st.sampled_from(["never", "except-last", "always"]), min_size=count, max_size=count)
    )
    schedule = draw(st.sampled_from(kinds))
    limits = draw(
        st.lists(st.one_of(st.none(), st.integers(400, 2000)), min_size=len(order), max_size=len(order))
    )
    chosen = draw(
        st.sets(st.sampled_from(["borders", "devices", "recompute", "schedule", "limits"]), min_size=1)
    )

    def change(data: Data) -> None:
        for index, (start, end) in enumerate(zip([0, *borders], [*borders, len(names)], strict=True)):
            stage = data["stages"][index]
            if "borders" in chosen:
                stage["layers"] = names[start:end]
            if "devices" in chosen:
                stage["device"] = order[rows[index]]
            if "recompute" in chosen:
                stage["recompute"] = modes[index]
        if "schedule" in chosen:
            data["schedule"] = schedule
        if "limits" in chosen:
            for device, limit in zip(data["cluster"]["devices"], limits, strict=True):
                device["memory_bytes"] = limit

    return change


EDITED = {
    "layers": st.lists(chains(most=3), min_size=4, max_size=5).map(
        lambda parts: list(itertools.chain(*parts))
    ),
    "cluster": clusters(limited=False).filter(lambda cluster: len(cluster) > 1),
    "micro_batches": st.integers(1, 5),
    "data": st.data(),
}
AS_DRAWN = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
each_schedule = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])


@each_schedule
@given(**EDITED)
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=AS_DRAWN)
def test_a_plan_that_was_edited_costs_what_its_layers_cost(
    schedule, layers, cluster, micro_batches, data, tmp_path
):
    used = range(2, min(len(cluster), len(layers) // 2) + 1)
    stages = data.draw(st.sampled_from(used)) * (2 if schedule in ("interleaved-1f1b", "zb-v") else 1)
    profile = profile_of(layers, [micro_batches], loss_seconds=0.5, input_bytes=7)
    plan = pipepart.plan(profile, cluster, schedule=schedule, stages=stages, recompute="never")
    path = edited(plan, data.draw(edits(plan)), tmp_path / "plan.json")
    raw = Plan.model_validate_json(path.read_text())  # without the figures computed anew
    timeline = from_scratch(raw, layers, 0.5, 7)
    bytes_ = needs(raw, layers, 7, timeline)
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
        read.schedule, devices=len(read.workers), micro_batches=micro_batches, chunks=read.chunks
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
