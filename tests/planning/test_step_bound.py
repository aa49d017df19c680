"""The lower bound of a step against the shortest of all: every cut, placement, order and split of backwards."""

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipepart
from pipepart import Cluster
from pipepart.planning.costs.step_bound import step_bound
from tests.planning import problems
from tests.planning.measured_steps import cluster_of
from tests.planning.problems import Layer, profile_of

Times = tuple[float, ...]


@dataclass(frozen=True)
class Stage:
    """Seconds of the actions of a stage on its device."""

    home: int
    forward: float
    inputs: float
    weights: float
    backward: float


@dataclass(frozen=True)
class Done:
    """When the forwards of a stage ended, its gradients left, and those left whose weight gradients are to come."""

    forwards: Times = ()
    gradients: Times = ()
    waiting: Times = ()


def shortest_step(layers: list[Layer], speeds: list[float], micro_batches: int, action: float) -> float:
    """The shortest step of all; transfers are free, memory has no limit."""
    best = math.inf
    for count in range(1, len(layers) + 1):
        for inner in itertools.combinations(range(1, len(layers)), count - 1):
            cut = [layers[a:b] for a, b in itertools.pairwise((0, *inner, len(layers)))]
            for homes in itertools.product(range(len(speeds)), repeat=count):
                stages = [
                    stage_of(own, home, micro_batches * speeds[home], action)
                    for own, home in zip(cut, homes, strict=True)
                ]
                empty = (Done(),) * count
                best = shortest_order(stages, micro_batches, empty, (0.0,) * len(speeds), best)
    return best


def stage_of(layers: list[Layer], home: int, per_second: float, action: float) -> Stage:
    forward, inputs, weights, split = (
        sum(parts) / per_second
        for parts in zip(
            *((one.forward, one.backward_input, one.backward_weight, one.split or 0.0) for one in layers),
            strict=True,
        )
    )
    factor = max(0.0, 1 + split / (inputs + weights)) if inputs + weights else 1.0
    seconds = (forward, inputs * factor, weights * factor, inputs + weights)
    return Stage(home, *(one + action for one in seconds))


def shortest_order(
    stages: list[Stage], count: int, done: tuple[Done, ...], free: Times, best: float, latest: float = 0.0
) -> float:
    """The shortest way to go on from what is done, or ``best``. Actions are added in the order of their starts.

    Micro-batches are alike, so those of one kind of action keep their order.
    """
    left = list(free)
    for stage, own in zip(stages, done, strict=True):
        least = min(stage.backward, stage.inputs + stage.weights)
        left[stage.home] += (count - len(own.forwards)) * stage.forward
        left[stage.home] += (count - len(own.gradients)) * least + len(own.waiting) * stage.weights
    if max(left) >= best:
        return best
    if all(len(own.gradients) == count and not own.waiting for own in done):
        return max(free)
    for at, (stage, own) in enumerate(zip(stages, done, strict=True)):
        before = done[at - 1].forwards if at else (0.0,) * count
        behind = done[at + 1].gradients if at + 1 < len(stages) else own.forwards
        ways: list[tuple[float, float, str]] = []
        if len(own.forwards) < min(count, len(before)):
            ways.append((before[len(own.forwards)], stage.forward, "F"))
        if len(own.gradients) < min(len(behind), len(own.forwards)):
            ready = max(behind[len(own.gradients)], own.forwards[len(own.gradients)])
            ways += [(ready, stage.backward, "B"), (ready, stage.inputs, "I")]
        if own.waiting:
            ways.append((own.waiting[0], stage.weights, "W"))
        for ready, seconds, kind in ways:
            start = max(ready, free[stage.home])
            if start < latest:
                continue
            end = start + seconds
            after = {
                "F": replace(own, forwards=tuple(sorted((*own.forwards, end)))),
                "B": replace(own, gradients=(*own.gradients, end)),
                "I": replace(own, gradients=(*own.gradients, end), waiting=(*own.waiting, end)),
                "W": replace(own, waiting=own.waiting[1:]),
            }[kind]
            now = tuple(end if home == stage.home else time for home, time in enumerate(free))
            best = shortest_order(stages, count, (*done[:at], after, *done[at + 1 :]), now, best, start)
    return best


def random_layers(draw: random.Random, count: int) -> list[Layer]:
    return [
        Layer(
            forward=draw.randint(0, 4),
            backward_input=draw.randint(0, 4),
            backward_weight=draw.randint(0, 3),
            split=draw.choice([0, 0, -1, 1]) / 4,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("count", "speeds", "micro_batches", "times"),
    [(2, [1.0, 1.0], 3, 4), (2, [1.0, 0.5], 3, 4), (3, [1.0, 1.0], 2, 4), (3, [1.0, 0.5, 0.25], 2, 2)],
)
def test_no_order_of_any_cut_is_shorter(count, speeds, micro_batches, times):
    draw, gaps = random.Random(0), []
    for _ in range(times):
        layers = random_layers(draw, count)
        (costs,) = profile_of(layers, [micro_batches]).costs
        action = draw.choice([0.0, 0.0, 0.25])
        best = shortest_step(layers, speeds, micro_batches, action)
        found = step_bound(costs, speeds, action_seconds=action)
        assert found <= best * (1 + 1e-9)
        gaps.append(best / found)
    assert sum(gaps) / times < 1.5


@given(problems.chains(), problems.clusters(), st.data())
@settings(max_examples=40, deadline=None)
def test_no_plan_is_predicted_to_be_shorter(layers, cluster, data):
    count, replicas = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 1, 2]))
    schedule = data.draw(
        st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v", "sequential"])
    )
    recompute = data.draw(st.sampled_from(["auto", "always"]))
    try:
        plan = pipepart.plan(
            profile_of(layers, [count], loss_seconds=data.draw(problems.seconds)),
            cluster,
            schedule=schedule,
            recompute=recompute,
            replicas=replicas,
            stages="auto",
        )
    except ValueError:
        return
    assert plan.step_bound <= plan.predicted.step_seconds * (1 + 1e-9)


def test_the_work_of_all_devices_and_the_layers_before_a_device_can_begin():
    """Four layers of 1 s in each part and two devices: the second one begins after a layer, the work is 12 s each."""
    (costs,) = profile_of([Layer(4, 4, 4)] * 4, [4]).costs
    assert step_bound(costs, [1, 1]) == (4 * 4 * 3 + 1) / 2
    assert step_bound(costs, [0.5, 0.5]) == 4 * 4 * 3 + 1
    assert step_bound(costs, [1, 0.5]) == (4 * 4 * 3 + 0.5) / 1.5
    assert step_bound(costs, [1, 1], replicas=2) == 4 * 4 * 3 / 2
    # A fourth device of these would not begin before the others are done.
    assert step_bound(costs, [1, 1, 1, 1e-9]) == pytest.approx((4 * 4 * 3 + 1 + 2) / 3, rel=1e-6)


def test_the_way_of_one_micro_batch_and_the_work_of_one_layer():
    (one,) = profile_of([Layer(1, 2, 4)] * 3, [1]).costs
    assert step_bound(one, [1] * 3) == 3 * 1 + 3 * 2 + 4
    # A layer that takes most of the time: the layers before it run once before and once behind.
    (heavy,) = profile_of([Layer(8, 8, 8), Layer(80, 80, 80), Layer(0, 0, 0)], [8]).costs
    assert step_bound(heavy, [1] * 3) == 1 + 8 * 30
    (no_weights,) = profile_of([Layer(8, 8, 8), Layer(80, 80, 0)], [8]).costs
    assert step_bound(no_weights, [1] * 3) == 1 + 8 * 20 + 1 + 1


def test_the_published_instance():
    """nemotron-nano-v2-9B of OctoPipe (arXiv 2509.23722), ticks of 0.01 ms: the work alone is 85,194."""
    kinds = {
        "E": (76, 287, 0),
        "M": (268, 430, 176),
        "-": (185, 191, 169),
        "*": (193, 245, 65),
        "L": (1422, 1571, 6),
    }
    text = "EM-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-L"
    layers = [
        Layer(8 * forward, 8 * inputs, 8 * weights)
        for forward, inputs, weights in map(kinds.__getitem__, text)
    ]
    (costs,) = profile_of(layers, [8]).costs
    work = 8 * sum(sum(kinds[kind]) for kind in text) / 4
    assert work == 85_194
    assert step_bound(costs, [1] * 4) == work + (76 + (76 + 268) + (76 + 268 + 185)) / 4


def test_each_action_takes_time_beside_its_layers():
    """Two actions of each micro-batch on each device that is used, and in the way of one micro-batch."""
    (costs,) = profile_of([Layer(4, 4, 4)] * 4, [4]).costs
    assert step_bound(costs, [1], action_seconds=0.5) == 4 * 4 * 3 + 4 * 2 * 0.5
    assert step_bound(costs, [1, 1], action_seconds=0.5) == (4 * 4 * 3 + 1) / 2 + 4 * 2 * 0.5
    (one,) = profile_of([Layer(1, 2, 4)] * 3, [1]).costs
    assert step_bound(one, [1] * 3, action_seconds=0.5) == 3 * 1 + 3 * 2 + 4 + 2 * 0.5
    plan = pipepart.plan(profile_of([Layer(4, 4, 4)] * 4, [4]), Cluster.virtual(1), schedule="sequential")
    assert plan.step_gap < 1e-9


def test_a_plan_says_how_far_it_may_be_above_the_best():
    plan = pipepart.plan(profile_of([Layer(4, 4, 4)] * 4, [4]), cluster_of(1, 1), schedule="1f1b")
    assert plan.predicted.step_seconds == 30
    assert plan.step_bound == 24.5
    assert plan.step_gap == 30 / 24.5 - 1
    by_hand = plan.model_copy(update={"profile": None})
    assert (by_hand.step_bound, by_hand.step_gap) == (0.0, 0.0)
