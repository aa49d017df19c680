"""A plan made again from what its steps took: the costs are as measured, and the cut is the one they give."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import pipepart
import schedules
from pipepart import Cluster, Pipeline, Plan, Profile
from pipepart.planning import StagePlan, refine, replan
from pipepart.profiling import Overhead
from tests.planning.measured_steps import cluster_of, measured, slowed, true_layers
from tests.planning.problems import Layer, profile_of

pytestmark = pytest.mark.usefixtures("short_profiles")

COUNTS = [2, 4]


def wrong_layers(layers: list[Layer], sizes: list[int], seed: int = 1) -> list[Layer]:
    """Costs that are wrong by one factor for the forwards of each group of layers and one for its backwards."""
    draw = random.Random(seed)
    wrong: list[Layer] = []
    for size in sizes:
        forward, backward = draw.uniform(0.2, 5), draw.uniform(0.2, 5)
        wrong += [
            replace(
                layer,
                forward=layer.forward * forward,
                backward_input=layer.backward_input * backward,
                backward_weight=layer.backward_weight * backward,
            )
            for layer in layers[len(wrong) : len(wrong) + size]
        ]
    assert len(wrong) == len(layers)
    return wrong


def stage_seconds(profile: Profile, plan: Plan, micro_batches: int) -> list[tuple[float, float]]:
    """Forward and backward of each stage for one micro-batch on its device, added up layer by layer."""
    costs = profile.at(micro_batches)
    found, first = [], 0
    for stage, device in zip(plan.stages, plan.devices, strict=True):
        own = list(costs.layers[first : first + len(stage.layers)])
        first += len(stage.layers)
        if first == len(costs.layers):
            own.append(costs.loss)
        forward = math.fsum(cost.forward.seconds for cost in own) / device.speed
        found.append((forward, math.fsum(cost.backward_seconds for cost in own) / device.speed))
    return found


CASES = {
    "unequal devices": ([1, 0.5, 2], {"schedule": "1f1b"}),
    "one after the other": ([1, 0.5, 2], {"schedule": "sequential"}),
    "backwards in two parts": ([1, 1, 0.5], {"schedule": "zb-h1"}),
    "all forwards again": ([1, 0.5, 1], {"schedule": "1f1b", "recompute": "always"}),
    "there and back": ([1, 0.5], {"schedule": "zb-v"}),
    "pairs side by side": ([1, 1], {"schedule": "dualpipe-v"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_costs_become_those_measured(case):
    speeds, options = CASES[case]
    layers = true_layers(8)
    true = profile_of(layers, COUNTS, loss_seconds=2)
    thought = profile_of(wrong_layers(layers, [3, 3, 2]), COUNTS)
    first = pipepart.plan(thought, cluster_of(*speeds, latency=0.01), micro_batches=4, **options)
    draft = profile_of(wrong_layers(layers, [len(stage.layers) for stage in first.stages]), COUNTS, 1)
    refined = refine(draft, first, measured(first, true))
    for got, wanted in zip(stage_seconds(refined, first, 4), stage_seconds(true, first, 4), strict=True):
        assert got == pytest.approx(wanted, rel=1e-9)


def test_layers_that_slow_each_other_are_not_slowed_twice():
    """The measured steps have the slowdown; the profile that was measured for one device at a time has it beside."""
    profile = profile_of(true_layers(6), [4])
    (costs,) = profile.costs
    layers = tuple(cost.model_copy(update={"slowdown": 1.5}) for cost in costs.layers)
    overhead = Overhead(action_seconds=0.01, message_seconds=0.02, devices=2, cores=2)
    profile = profile.model_copy(
        update={"costs": (costs.model_copy(update={"layers": layers}),), "overhead": overhead}
    )
    plan = pipepart.plan(profile, pipepart.Cluster.virtual(2), schedule="1f1b")
    again = replan(plan, plan.simulate(), profile)
    assert again.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-12)
    forward = sum(cost.forward.seconds for cost in costs.layers)
    assert sum(stage.forward_seconds for stage in again.stages) == pytest.approx(1.5 * forward)


def test_other_micro_batch_sizes_are_scaled_by_the_same_factors():
    layers = true_layers(6)
    profile = profile_of(layers, COUNTS)
    plan = pipepart.plan(profile, cluster_of(1, 0.5), schedule="1f1b", micro_batches=4)
    true = profile_of(wrong_layers(layers, [len(stage.layers) for stage in plan.stages]), COUNTS)
    refined = refine(profile, plan, measured(plan, true))
    for count in COUNTS:
        for got, wanted in zip(refined.at(count).layers, true.at(count).layers, strict=True):
            assert got.forward.seconds == pytest.approx(wanted.forward.seconds, rel=1e-9)
            assert got.backward_input.seconds == pytest.approx(wanted.backward_input.seconds, rel=1e-9)
            assert got.backward_weight.seconds == pytest.approx(wanted.backward_weight.seconds, rel=1e-9)
    assert refined.fingerprint == profile.fingerprint


def test_a_slow_first_micro_batch_and_a_slow_step_change_nothing():
    layers = true_layers(6)
    true = profile_of(layers, [8])
    plan = pipepart.plan(profile_of(layers[::-1], [8]), cluster_of(1, 1), schedule="1f1b")
    good = measured(plan, true)
    once = refine(true, plan, slowed(good, {0: 7.0}))
    several = refine(true, plan, [good, slowed(good, dict.fromkeys(range(8), 3.0)), slowed(good, {1: 9.0})])
    for found in (once, several):
        for got, wanted in zip(stage_seconds(found, plan, 8), stage_seconds(true, plan, 8), strict=True):
            assert got == pytest.approx(wanted, rel=1e-9)


def test_what_takes_no_time_keeps_taking_none():
    """Frozen layers in front: their stage has no backward, however long its empty action took."""
    frozen = Layer(forward=2, backward_input=0, parameters=1, trained=False)
    layers = [frozen, frozen, Layer(forward=1, backward_input=3, parameters=1)]
    plan = pipepart.plan(profile_of(layers, [4]), cluster_of(1, 1), schedule="1f1b", cut_before=["layer2"])
    trained = [replace(layer, backward_input=layer.backward_input + 0.5) for layer in layers]
    refined = refine(profile_of(layers, [4]), plan, measured(plan, profile_of(trained, [4])))
    assert [cost.backward_seconds for cost in refined.costs[0].layers] == pytest.approx([0, 0, 3.5 / 4])


def test_a_trace_of_another_plan_is_refused():
    profile = profile_of(true_layers(6), COUNTS)
    plan = pipepart.plan(profile, cluster_of(1, 1), schedule="1f1b", micro_batches=2)

    def trace_of(devices: int = 2, **options) -> schedules.Timeline:
        return pipepart.plan(profile, cluster_of(*[1] * devices), **options).simulate()

    for trace, words in (
        (trace_of(schedule="gpipe", micro_batches=2), "its schedule: 'gpipe', the plan's: '1f1b'"),
        (trace_of(schedule="1f1b", micro_batches=4), "its micro-batches: 4, the plan's: 2"),
        (trace_of(3, schedule="1f1b", micro_batches=2), "its devices: 3, the plan's: 2"),
        (
            trace_of(schedule="1f1b", micro_batches=2, recompute="always"),
            "action 2 of device 0 is 0RECOMPUTE0, the plan's 0B0",
        ),
    ):
        with pytest.raises(ValueError, match="the trace is not a step of this plan: " + words):
            replan(plan, trace)
        with pytest.raises(ValueError, match="trace 1 is not a step of this plan: " + words):
            replan(plan, [plan.simulate(), trace])


def test_an_empty_trace_is_refused():
    plan = pipepart.plan(profile_of(true_layers(6), [4]), cluster_of(1, 1), schedule="1f1b")
    schedule = plan.build_schedule()
    zeros = [[0.0] * len(row) for row in schedule.actions]
    numbers = [[math.nan] * len(row) for row in schedule.actions]
    bare = replace(schedule, actions=((), ()))
    for trace, words in (
        (None, "make the Pipeline with trace=True and run a step first"),
        ([], "there is no trace"),
        ([None], "the trace is no Timeline but None"),
        (schedules.Timeline(bare, [[], []], [[], []]), "the trace is empty"),
        (schedules.Timeline(schedule, zeros, zeros), "the trace is empty"),
        (schedules.Timeline(schedule, numbers, numbers), "has times that are no numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            replan(plan, trace)  # pyright: ignore[reportArgumentType]


def test_a_profile_of_other_layers_is_refused():
    plan = pipepart.plan(profile_of(true_layers(6), [4]), cluster_of(1, 1), schedule="1f1b")
    trace = plan.simulate()
    with pytest.raises(ValueError, match="'layer6' is only in one of them"):
        replan(plan, trace, profile_of(true_layers(7), [4]))
    larger = [replace(layer, parameters=9) for layer in true_layers(6)]
    with pytest.raises(ValueError, match="of another model than the plan"):
        replan(plan, trace, profile_of(larger, [4]))
    with pytest.raises(ValueError, match=r"measured for \[8\] micro-batches, not for 4"):
        replan(plan, trace, profile_of(true_layers(6), [8]))


def test_a_plan_by_hand_needs_a_profile():
    stages = (
        StagePlan(layers=("layer0", "layer1", "layer2"), device="device:0", forward_seconds=1),
        StagePlan(layers=("layer3",), device="device:1", forward_seconds=1),
    )
    plan = Plan(stages=stages, cluster=cluster_of(1, 1), schedule="1f1b", micro_batches=4)
    truth = profile_of([Layer()] * 4, [4])
    trace = measured(plan, truth)
    with pytest.raises(ValueError, match="holds no profile"):
        replan(plan, trace)
    again = replan(plan, trace, profile_of([Layer(forward=5)] * 4, [4]))
    assert [len(stage.layers) for stage in again.stages] == [2, 2]


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_real_step_is_planned_again(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Tanh())
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    loss_fn = nn.MSELoss()
    profile = pipepart.profile(model, x, loss_fn=loss_fn, target=y, micro_batches=4)
    plan = pipepart.plan(profile, Cluster.virtual(2), schedule="1f1b", recompute=recompute)
    traces = []
    with Pipeline(model, plan, loss_fn, trace=True) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            traces.append(pipe.last_trace)
    assert all(traces)
    again = replan(plan, traces, recompute=recompute)
    assert [name for stage in again.stages for name in stage.layers] == list("01234")
    assert (again.schedule, again.micro_batches, again.cluster) == ("1f1b", 4, plan.cluster)
    assert again.profile is not None
    assert again.profile.costs[0].micro_batches == 4
    assert {stage.recompute for stage in again.stages} == {recompute}
    with Pipeline(model, again, loss_fn) as pipe:
        assert pipe.step(x, target=y) == pytest.approx(loss_fn(model(x), y).item(), rel=1e-5)
