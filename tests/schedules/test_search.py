"""Search and bound against proven optima, every fixed schedule, and each other."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from schedules import (
    ScheduleError,
    StageCosts,
    bound,
    build,
    check,
    names,
    search,
    simulate,
)
from schedules.core.placement import linear, looped, wave

OPTIMA = Path(__file__).parents[1] / "data" / "schedules" / "optima_small.json"
RECORDS = json.loads(OPTIMA.read_text())
PROVEN = [record for record in RECORDS if record["status"] == "OPTIMAL"]
LINEAR = [record for record in PROVEN if record["place"] == "linear"]

# Proven by a constraint solver: F, I, W, latency from each stage to the next and back, micro-batches that each
# device can hold, micro-batches in all, objective, optimum.
UNEQUAL = [
    ([126, 111, 88], [139, 122, 97], [101, 88, 70], [100, 30], [3, 3, 3], 6, "zero-bubble", 2820),
    ([83, 105, 93], [91, 116, 102], [66, 84, 74], [0, 0], [2, 2, 2], 3, "makespan", 1312),
    ([106, 83, 86], [117, 92, 94], [85, 67, 69], [0, 30], [3, 3, 3], 6, "makespan", 2062),
    ([120, 130, 95], [118, 84, 115], [62, 88, 66], [10, 100], [6, 1, 2], 4, "makespan", 3080),
    ([119, 122, 89], [124, 102, 127], [59, 98, 102], [30, 30], [1, 5, 5], 6, "makespan", 5172),
    ([118, 149, 95], [121, 79, 94], [51, 63, 101], [10, 10], [4, 4, 4], 9, "makespan", 2897),
    ([87, 86, 119], [107, 83, 63], [96, 122, 108], [10, 30], [3, 3, 3], 3, "makespan", 1129),
    ([44, 169, 189], [183, 154, 170], [164, 126, 98], [100, 10], [5, 6, 6], 6, "makespan", 3119),
]  # fmt: skip


def problem_of(record):
    """Costs, caps, placement and objective of a record of proven optima."""
    chunks = 1 if record["place"] == "linear" else 2
    p = record["p"]
    stages = p * chunks
    costs = StageCosts(
        *([record[kind] / chunks] * stages for kind in "FIW"),
        latency=record["comm"],
        stash_bytes=[1 / chunks] * stages,
    )
    placement = linear(p) if chunks == 1 else wave(p, 2)
    return costs, [record["cap"]] * p, placement, "makespan" if record["metric"] == "sync" else "zero-bubble"


def seconds_of(schedule, costs, objective):
    timeline = simulate(schedule, costs)
    return timeline.makespan if objective == "makespan" else timeline.zero_bubble_seconds


def gap(record, effort):
    costs, caps, placement, objective = problem_of(record)
    found = search(costs, record["p"], record["m"], caps, placement, objective, effort=effort)
    check(found, costs, caps)
    return seconds_of(found, costs, objective) / record["obj"] - 1


@pytest.mark.parametrize(
    ("records", "effort", "mean"),
    [
        pytest.param(LINEAR[::4], 0.1, 0.005, id="some on a line"),
        pytest.param(LINEAR, 0.1, 0.005, id="line", marks=pytest.mark.slow),
        pytest.param([r for r in PROVEN if r["place"] == "v"], 1.0, 0.01, id="vee", marks=pytest.mark.slow),
    ],
)
def test_search_is_near_the_proven_optima_and_never_below(records, effort, mean):
    gaps = [gap(record, effort) for record in records]
    assert min(gaps) > -1e-9
    assert max(gaps) <= 0.03
    assert sum(gaps) / len(gaps) <= mean


def unequal(case):
    """Costs, devices, micro-batches, memory, placement and objective of a case, and its optimum."""
    *seconds, hops, caps, m, objective, optimum = case
    p = len(caps)
    latency = [[0.0] * p for _ in range(p)]
    for stage, hop in enumerate(hops):
        latency[stage][stage + 1] = latency[stage + 1][stage] = hop
    return (StageCosts(*seconds, latency=latency, stash_bytes=[1] * p), p, m, caps, (), objective), optimum


def test_search_and_bound_enclose_the_proven_optima_of_unequal_stages_and_links():
    gaps = []
    for case in UNEQUAL:
        problem, optimum = unequal(case)
        found = search(*problem, effort=0.2)
        gaps.append(seconds_of(found, problem[0], problem[-1]) / optimum - 1)
        assert bound(*problem) <= optimum + 1e-6
    assert min(gaps) > -1e-9
    assert max(gaps) <= 0.03
    assert sum(gaps) / len(gaps) <= 0.005


def test_bound_is_never_above_a_proven_optimum_and_often_on_it():
    on_it = 0
    for record in PROVEN:
        costs, caps, placement, objective = problem_of(record)
        limit = bound(costs, record["p"], record["m"], caps, placement, objective)
        assert limit <= record["obj"] + 1e-6
        on_it += limit >= record["obj"] * (1 - 1e-6)
    assert on_it >= 40


def test_zb_h1_and_zb_h2_are_optimal_at_their_caps():
    for record in LINEAR:
        p, (costs, _, _, objective) = record["p"], problem_of(record)
        if name := {p: "zb-h1", 2 * p - 1: "zb-h2"}.get(record["cap"]):
            taken = seconds_of(build(name, p, record["m"]), costs, objective)
            assert taken == pytest.approx(record["obj"])


def random_problem(draw, p, chunks=1, whole=False):
    """Costs and memory; ``whole``: backwards are cheaper than their parts, and W may hold more than the stash."""
    stages = p * chunks
    forward, inputs, weights = ([draw.uniform(0.2, 2.0) for _ in range(stages)] for _ in range(3))
    costs = StageCosts(
        forward,
        inputs,
        weights,
        backward=[
            (i + w) * (draw.uniform(0.7, 1.05) if whole else 1) for i, w in zip(inputs, weights, strict=True)
        ],
        latency=[[draw.choice([0.0, 0.1, 0.5]) for _ in range(p)] for _ in range(p)],
        stash_bytes=[draw.uniform(0.5, 1.5) for _ in range(stages)],
        weight_stash_bytes=[
            draw.uniform(0.5, 2.5) if whole else draw.uniform(0.1, 0.5) for _ in range(stages)
        ],
    )
    return costs, [draw.uniform(2.0, 1.5 * p) * 1.5 * chunks for _ in range(p)]


@pytest.mark.parametrize(
    ("chunks", "seed", "whole"),
    [(1, 0, False), (1, 1, False), (2, 2, False), (3, 3, False), (1, 29, True), (2, 12, True)],
)
def test_search_lies_between_the_bound_and_every_fixed_schedule_that_fits(chunks, seed, whole):
    draw = random.Random(f"{chunks} {seed}")
    p, m = draw.choice([2, 3, 4]), draw.randint(2, 9)
    costs, memory = random_problem(draw, p, chunks, whole)
    found = search(costs, p, m, memory, effort=0.05)
    check(found, costs, memory)
    taken = simulate(found, costs).makespan
    assert taken >= bound(costs, p, m, memory) - 1e-9
    for name in names():
        try:
            fixed = build(name, p, m, chunks=chunks)
            check(fixed, costs, memory)
        except ScheduleError:
            continue
        if fixed.replicas == 1 and not fixed.versions:
            assert taken <= simulate(fixed, costs).makespan + 1e-9, name


def test_search_does_not_depend_on_the_unit_of_seconds():
    costs, memory = random_problem(random.Random(1), 4)
    unit = 2.0**-40
    fields = ("forward", "backward_input", "backward_weight", "backward", "recompute")
    small = replace(
        costs,
        latency=[[seconds * unit for seconds in row] for row in cast(list[list[float]], costs.latency)],
        **{name: [seconds * unit for seconds in getattr(costs, name)] for name in fields},
    )
    found = search(costs, 4, 8, memory, effort=0.05)
    assert search(small, 4, 8, memory, effort=0.05) == found == search(costs, 4, 8, memory, effort=0.05)


def test_search_stops_at_its_time_limit_with_a_schedule_that_fits():
    costs, memory = random_problem(random.Random(2), 4)
    found = search(costs, 4, 16, memory, seconds=0.0)
    check(found, costs, memory)


def test_search_uses_the_placement_it_is_given():
    costs, _ = random_problem(random.Random(3), 4)
    for placement in ((2, 0, 3, 1), (3, 2, 1, 0)):
        found = search(costs, 4, 6, placement=placement, effort=0.05)
        check(found)
        assert found.device_of == placement
    assert search(
        random_problem(random.Random(4), 2, 2)[0], 2, 4, placement=looped(2, 2), effort=0.02
    ).device_of == (0, 1, 0, 1)


@pytest.mark.parametrize("seed", [0, 4, 6])
def test_search_keeps_the_order_of_micro_batches(seed):
    draw = random.Random(seed)
    forward, backward = ([draw.uniform(low, high) for _ in range(4)] for low, high in ((0.2, 2), (0.5, 3)))
    costs = StageCosts(forward, backward, backward, backward=backward, latency=draw.choice([0, 0.1, 0.5, 1]))
    found = search(costs, 2, 4, placement=looped(2, 2), effort=0.02)
    streams: dict[object, list[int | None]] = {}
    for action in (action for row in found.actions for action in row):
        streams.setdefault((action.kind, action.stage), []).append(action.micro_batch)
    assert all(order == sorted(order, key=str) for order in streams.values())


def test_build_makes_a_searched_schedule_from_costs():
    costs, memory = random_problem(random.Random(5), 3)
    check(build("search", 3, 6, costs=costs, memory=memory, effort=0.02), costs, memory)
    assert (
        build("search", 2, 2, chunks=2, costs=random_problem(random.Random(5), 4)[0], effort=0.01).stages == 4
    )


def test_devices_without_memory_run_stages_without_stash():
    costs = StageCosts([1], [1], [1])
    assert bound(costs, 1, 4, memory=[0]) == 12
    assert simulate(search(costs, 1, 4, memory=[0]), costs).makespan == 12


def test_search_finds_what_only_a_whole_backward_leaves_room_for():
    """Split, a backward leaves 3 bytes to its weight gradient: no order with split backwards fits."""
    costs = StageCosts([1, 1], [1, 1], [1, 1], stash_bytes=[1, 1], weight_stash_bytes=[3, 3])
    found = search(costs, 2, 4, memory=[2, 2], effort=0.05)
    check(found, costs, [2, 2])
    assert simulate(found, costs).makespan == simulate(build("1f1b", 2, 4), costs).makespan
