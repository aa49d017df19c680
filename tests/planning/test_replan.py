"""A plan made again from what its steps took: with the costs as measured, and with all that was asked of the first."""

import inspect
import math
import random
from dataclasses import fields, replace
from typing import Any

import pytest

import pipepart
import schedules
from pipepart import Cluster, Plan, Profile
from pipepart.planning import PlanOptions, refine, replan
from pipepart.profiling import Overhead
from tests.planning.problems import Layer, cluster_of, profile_of, stages_on


def true_layers(count: int, seed: int = 0) -> list[Layer]:
    draw = random.Random(seed)
    return [
        Layer(
            forward=draw.uniform(1, 9),
            backward_input=draw.uniform(1, 9),
            backward_weight=draw.uniform(0, 5),
            parameters=8,
            output=draw.randrange(1, 20),
            saved=draw.randrange(1, 20),
        )
        for _ in range(count)
    ]


def measured(plan: Plan, true: Profile) -> schedules.Timeline:
    """A step of the plan as it would be measured if the layers cost that."""
    return plan.model_copy(update={"profile": true}).refreshed().simulate()


def slowed(trace: schedules.Timeline, slow: dict[int, float]) -> schedules.Timeline:
    """The same step, its actions of some micro-batches longer by a factor, one after the other on each device."""
    starts, ends = [], []
    for row in trace.rows:
        now, own_starts, own_ends = 0.0, [], []
        for action, start, end in row:
            now = max(now, start)
            own_starts.append(now)
            now += (end - start) * slow.get(action.micro_batch or 0, 1.0)
            own_ends.append(now)
        starts.append(own_starts)
        ends.append(own_ends)
    return schedules.Timeline(trace.schedule, starts, ends)


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
                split=layer.split and layer.split * backward,
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
    layers = [replace(layer, split=2.0 if "zb" in options["schedule"] else None) for layer in true_layers(8)]
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


def test_a_trace_of_another_plan_or_of_no_step_is_refused():
    profile = profile_of(true_layers(6), COUNTS)
    plan = pipepart.plan(profile, cluster_of(1, 1), schedule="1f1b", micro_batches=2)
    schedule, other = plan.build_schedule(), "trace 1 is not a step of this plan: "
    zeros, numbers = ([[time] * len(row) for row in schedule.actions] for time in (0.0, math.nan))

    def trace_of(devices: int = 2, **changes: Any) -> Any:
        options: dict[str, Any] = {"schedule": "1f1b", "micro_batches": 2, **changes}
        return [plan.simulate(), pipepart.plan(profile, cluster_of(*[1] * devices), **options).simulate()]

    cases: list[tuple[Any, str]] = [
        (trace_of(schedule="gpipe"), other + "its schedule: 'gpipe', the plan's: '1f1b'"),
        (trace_of(micro_batches=4), other + "its micro-batches: 4, the plan's: 2"),
        (trace_of(3), other + "its devices: 3, the plan's: 2"),
        (trace_of(recompute="always"), other + "action 2 of device 0 is 0RECOMPUTE0, the plan's 0B0"),
        (trace_of(3)[1], "the trace is not a step of this plan"),
        (None, "make the Pipeline with trace=True and run a step first"),
        ([], "there is no trace"),
        ([None], "the trace is no Timeline but None"),
        (schedules.Timeline(schedule, zeros, zeros), "the trace is empty"),
        (schedules.Timeline(schedule, numbers, numbers), "has times that are no numbers"),
    ]
    for trace, words in cases:
        with pytest.raises(ValueError, match=words):
            replan(plan, trace)


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
    stages = stages_on([f"layer{index}" for index in range(4)], [0, 3, 4], ["device:0", "device:1"])
    plan = Plan(stages=stages, cluster=cluster_of(1, 1), schedule="1f1b", micro_batches=4)
    truth = profile_of([Layer()] * 4, [4])
    trace = measured(plan, truth)
    with pytest.raises(ValueError, match="holds no profile"):
        replan(plan, trace)
    again = replan(plan, trace, profile_of([Layer(forward=5)] * 4, [4]))
    assert [len(stage.layers) for stage in again.stages] == [2, 2]


LAYERS = [
    Layer(cost, 2 * cost, 1 + cost % 3, parameters=5, output=4, saved=8, waiting=3, split=0.1)
    for cost in (3, 1, 4, 1, 5, 2)
]
TWO = Cluster.parse(["1KiB", "1KiB@0.5"], link="50B/s", latency=0.01)


# The keywords of a plan.
REQUESTS: dict[str, dict[str, Any]] = {
    "any schedule": {},
    "a searched order": {"schedule": "search", "micro_batches": 2},
    "any number of stages": {"schedule": "gpipe", "stages": "auto"},
    "chunks": {"schedule": "interleaved-1f1b", "chunks": 3},
    "any number of replicas": {"schedule": "1f1b", "replicas": "auto"},
    "colocate": {"schedule": "1f1b", "colocate": [{"layer4", "layer1"}]},
    "the whole cut": {"schedule": "1f1b", "cut_before": ["layer1"]},
    "recompute": {"schedule": "1f1b", "recompute": "except-last"},
    "stages shared by two devices": {"tensor": 2, "shard": True, "replicas": 2, "stages": 1},
    "compressed messages": {"schedule": "1f1b", "compress": "int8"},
    "the loss of the whole mini-batch": {"reduction": "batch"},
}


def cluster_for(options: dict[str, Any]) -> Cluster:
    return Cluster.parse(["1KiB"] * 4, link="50B/s") if "tensor" in options else TWO


@pytest.mark.parametrize("case", REQUESTS)
def test_a_plan_made_again_keeps_what_was_asked(case, tmp_path):
    options = REQUESTS[case]
    profile, cluster = profile_of(LAYERS, COUNTS), cluster_for(options)
    first = pipepart.plan(profile, cluster, **options)
    first.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == first
    # The layers in front are three times as slow as was thought.
    slow = [
        replace(one, forward=3 * one.forward, backward_input=3 * one.backward_input) for one in LAYERS[:2]
    ]
    trace = measured(first, profile_of([*slow, *LAYERS[2:]], COUNTS))
    again = replan(loaded, trace, profile)
    assert again == pipepart.plan(refine(profile, first, trace), cluster, **options)
    assert again.constraints == first.constraints


def check_alternatives(profile: Profile, cluster: Cluster, **request: Any) -> int:
    """Each alternative, pasted back as keywords, gives a plan with the step and the memory that it shows."""
    plan = pipepart.plan(profile, cluster, **request)
    shown = [other for other in plan.alternatives if other.step_seconds is not None]
    for other in shown:
        pasted = pipepart.plan(profile, cluster, **{**request, **other.keywords})
        assert pasted.predicted.step_seconds == pytest.approx(other.step_seconds, rel=1e-9), other
        assert max(pasted.predicted.memory_bytes) == other.memory_bytes, other
        assert (pasted.schedule, pasted.micro_batches) == (other.schedule, other.micro_batches)
        assert (len(pasted.stages), pasted.replicas) == (other.stages, other.replicas)
    return len(shown)


ALTERNATIVES = ["any number of stages", "any number of replicas", "the loss of the whole mini-batch"]


@pytest.mark.parametrize(
    "case",
    [case if case in ALTERNATIVES else pytest.param(case, marks=pytest.mark.slow) for case in REQUESTS],
)
def test_each_alternative_gives_the_plan_that_it_shows(case):
    check_alternatives(profile_of(LAYERS, COUNTS), cluster_for(REQUESTS[case]), **REQUESTS[case])


@pytest.mark.slow
@pytest.mark.parametrize("host_link", [None, 30.0], ids=["recompute", "offload"])
def test_each_alternative_of_tight_memory_gives_the_plan_that_it_shows(host_link):
    cluster = Cluster.parse(["145B"] * 2, host_link=host_link)
    assert check_alternatives(profile_of(LAYERS, [8]), cluster) > 2


def test_alternatives_that_were_not_planned_to_the_end_are_not_faster():
    """What their keywords give takes at least as long as the row says, or does not fit."""
    profile = profile_of(LAYERS, COUNTS)
    plan = pipepart.plan(profile, TWO)
    others = [other for other in plan.alternatives if other.step_seconds is None]
    assert others
    for other in others:
        try:
            pasted = pipepart.plan(profile, TWO, **other.keywords)
        except pipepart.InfeasiblePlanError:
            assert "does not fit" in other.why
        else:
            assert other.why.startswith("at least ")
            assert pasted.predicted.step_seconds >= plan.predicted.step_seconds * (1 - 1e-9)
            assert pasted.schedule == other.schedule


def test_keywords_of_the_call_replace_those_of_the_plan():
    profile = profile_of(LAYERS, COUNTS)
    three = pipepart.plan(profile, TWO, schedule="interleaved-1f1b", chunks=3, micro_batches=4)
    trace = three.simulate()
    assert replan(three, trace, schedule="1f1b") == replan(three, trace, schedule="1f1b", chunks=None)
    assert replan(three, trace, profile, micro_batches=2).micro_batches == 2
    assert replan(three, trace, chunks=2).constraints.chunks == 2


def test_a_plan_keeps_every_keyword():
    """A keyword that a plan forgets would be lost when it is made again."""
    keywords = {
        name: one.default
        for name, one in inspect.signature(pipepart.plan).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert {field.name: field.default for field in fields(PlanOptions)} == keywords
