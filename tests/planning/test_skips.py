"""Values that several layers use: loads, messages and memory of every cut, against a model hop by hop."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import pipepart
import schedules
from pipepart import Cluster, InfeasiblePlanError, Pipeline, Plan, Profile
from pipepart.cluster import PairLink
from pipepart.planning import value_ways
from pipepart.planning.costs.layer_ranges import ChainCosts
from pipepart.planning.costs.stage_memory import StashCounts
from pipepart.planning.partition.chain_dp import ChainProblem
from pipepart.planning.partition.order_search import OrderSpaces
from pipepart.planning.plans.stage_plan import predict_stages
from pipepart.profiling import Costs
from schedules.searching.clock import Clock
from tests.capture import handwritten
from tests.planning.problems import Layer, Values, profile_of, stages_on, with_values

pytestmark = pytest.mark.usefixtures("short_profiles", "no_suggestions")

LATENCY, BANDWIDTH = 0.01, 1000.0
NAMES = [f"layer{index}" for index in range(8)]
LIKE = Cluster.parse(["1GiB"] * 4, link=BANDWIDTH, latency=LATENCY)


def problem(seed: int, count: int = 8) -> tuple[list[Layer], Values, Profile]:
    """Layers, the values that skip some of them, and their profile."""
    pick = random.Random(seed)
    layers = [
        Layer(
            forward=pick.random(),
            backward_input=pick.random(),
            output=pick.randrange(100),
            parameters=pick.randrange(1, 50),
            trained=index > 1 or seed % 2 == 0,
            saved=pick.randrange(200),
        )
        for index in range(count)
    ]
    values = [
        (pick.randrange(1, 2000), tuple(sorted(pick.sample(range(count), pick.randrange(2, 5)))))
        for _ in range(pick.randrange(1, 6))
    ]
    return layers, values, with_values(profile_of(layers, (1,), optimizer="sgd"), values)


def skipping(costs: Costs) -> list[int]:
    """The bytes of the values that skip layers."""
    return [
        value.bytes
        for value in costs.values
        if any(other > one + 1 for one, other in itertools.pairwise(value.layers))
    ]


def hops(used: Sequence[int], edges: Sequence[int]) -> list[tuple[int, int]]:
    """The stages that a value hops between, one hop after the other."""
    stages = sorted({next(s for s, end in enumerate(edges[1:]) if layer < end) for layer in used})
    return list(itertools.pairwise(stages))


def loads(
    layers: list[Layer], values: Values, edges: Sequence[int], devices: Sequence[str], cluster: Cluster
) -> list[float]:
    """Transfer seconds of each stage: each message and each hop costs both of its ends."""
    found = [0.0] * (len(edges) - 1)

    def send(one: int, other: int, size: float, latency: float = 0.0) -> None:
        if devices[one] == devices[other]:
            return
        link = cluster.link_between(devices[one], devices[other])
        seconds = latency * link.latency + size / (link.bandwidth or np.inf)
        for stage, border in ((one, edges[one + 1]), (other, edges[other])):
            found[stage] += seconds * (2 if any(layer.trained for layer in layers[:border]) else 1)

    for stage in range(len(found) - 1):
        send(stage, stage + 1, layers[edges[stage + 1] - 1].output, latency=1)
    for size, used in values:
        for one, other in hops(used, edges):
            send(one, other, size)
    return found


def cuts(layers: int, stages: int) -> list[list[int]]:
    return [[0, *inner, layers] for inner in itertools.combinations(range(1, layers), stages - 1)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stages", [2, 4])
def test_the_best_cut_of_one_stage_a_device_is_that_of_all_cuts(seed, stages):
    layers, values, profile = problem(seed)
    cluster = Cluster.parse(["1GiB"] * stages, link=BANDWIDTH, latency=LATENCY)
    costs = ChainCosts(profile, profile.costs[0])
    counts = StashCounts(schedules.build("1f1b", stages, 4))
    found = ChainProblem(costs, OrderSpaces(cluster, costs.layers), stages, {"never": counts}, Clock()).best()
    names = [device.name for device in cluster.devices]
    bottlenecks = {}
    for edges in cuts(len(layers), stages):
        transfers = loads(layers, values, edges, names, cluster)
        compute = [
            sum(x.forward + x.backward_input for x in layers[a:b]) for a, b in itertools.pairwise(edges)
        ]
        bottlenecks[tuple(edges[:-1])] = max(a + b for a, b in zip(transfers, compute, strict=True))
    assert found is not None
    assert found.bound == pytest.approx(min(bottlenecks.values()), rel=1e-9)
    assert bottlenecks[found.first_layers] == pytest.approx(found.bound, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("unlike", [False, True])
def test_transfers_of_all_cuts_on_any_devices_and_links(seed, schedule, unlike):
    layers, values, profile = problem(seed)
    devices, chunks = (4, 1) if schedule == "1f1b" else (2, 2)
    cluster = Cluster.parse(
        [f"1GiB@{1 + index}" for index in range(devices)], link=BANDWIDTH, latency=LATENCY
    )
    names = [device.name for device in cluster.devices]
    if unlike:
        slow = PairLink(between=(names[0], names[-1]), bandwidth=BANDWIDTH / 4)
        cluster = cluster.model_copy(update={"links": (slow,)})
    rows = schedules.build(schedule, devices, 4, chunks).device_of
    costs = ChainCosts(profile, profile.costs[0])
    homes = [names[row] for row in rows]
    for edges in cuts(len(layers), 4):
        predicted = predict_stages(stages_on(NAMES, edges, homes, "always"), profile, costs, cluster)
        expected = loads(layers, values, edges, homes, cluster)
        assert [stage.transfer_seconds for stage in predicted] == pytest.approx(expected, rel=1e-9)
        waiting = [0] * 4
        for size, used in values:
            for one, other in hops(used, edges):
                waiting[one] += size if other > one + 1 and costs.has_backward[edges[one + 1] - 1] else 0
        for stage, more, span in zip(predicted, waiting, itertools.pairwise(edges), strict=True):
            stash, inputs = costs.sizes(slice(*span)).per_micro_batch[0, 0, :2].tolist()
            assert (stage.stash_bytes, stage.boundary_bytes) == (stash + more, inputs + more)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["never", "always"])
def test_the_plan_in_the_least_memory_is_the_only_one(seed, mode):
    """With skipping values that wait in the memory of their sender."""
    _, _, profile = problem(seed, count=6)
    plans = []
    for edges in cuts(6, 4):
        stages = stages_on(NAMES, edges, [f"device:{row}" for row in range(4)], mode)
        draft = Plan.model_construct(
            stages=stages, cluster=LIKE, schedule="1f1b", micro_batches=1, profile=profile
        )
        plans.append(draft.predict())
    least = min(max(plan.predicted.memory_bytes) for plan in plans)
    options = {"schedule": "1f1b", "stages": 4, "recompute": mode}
    found = pipepart.plan(profile, LIKE.with_memory(least), **options)
    assert max(found.predicted.memory_bytes) == least
    proven = "in the best cut found" if skipping(profile.costs[0]) else "at best"
    with pytest.raises(InfeasiblePlanError, match=f"is short by .* {proven}: it needs"):
        pipepart.plan(profile, LIKE.with_memory(least - 1), **options)


@pytest.mark.parametrize("seed", range(4))
def test_memory_of_every_stage(seed):
    layers, values, profile = problem(seed)
    costs = ChainCosts(profile, profile.costs[0])
    rows = {row.start: row for row in costs.rows([len(layers)] * len(layers))}
    for start, end in itertools.combinations(range(len(layers) + 1), 2):
        stash = boundary = waiting = passing = 0
        for size, used in values:
            before, inside = [u for u in used if u < start], [u for u in used if start <= u < end]
            behind = [u for u in used if u >= end]
            is_input = bool(before and inside)
            boundary += size * is_input
            stash += size * (is_input or used[1] in inside)
            waiting += size * bool(inside and behind and behind[0] > end)
            passing += size * bool(before and behind and not inside)
        plain = sum(layer.saved for layer in layers[start:end])
        plain_input = layers[start - 1].output if start else 0
        sizes, row = costs.sizes(slice(start, end)), rows[start]
        if not costs.has_backward[end - 1]:
            stash, boundary, plain, plain_input, waiting = 0, 0, 0, 0, 0
        assert sizes.per_micro_batch[0, 0, :2].tolist() == [
            stash + plain + plain_input,
            boundary + plain_input,
        ]
        at = end - start - 1
        assert row.sizes is not None
        assert row.sizes.per_micro_batch[at, 0].tolist() == sizes.per_micro_batch[0, 0].tolist()
        assert row.sizes.transient[at].tolist() == sizes.transient[0].tolist()
        assert row.waiting is not None
        assert row.passing is not None
        assert (row.waiting[at], row.passing[at]) == (waiting, passing)


def test_the_bytes_of_a_plan_are_those_that_travel():
    torch.manual_seed(0)
    model = handwritten.UNet(levels=3)
    x, y = torch.ones(4, 3, 8, 8), torch.zeros(4, 2, 8, 8)
    profile = pipepart.profile(
        model, x, loss_fn=F.mse_loss, target=y, micro_batches=[1, 2], seconds=0, progress=False
    )
    skips = skipping(profile.at(2))
    assert skips == [2 * 4 * 8 * 8 * 4 // 2**level for level in range(3)]
    assert skipping(profile.at(1)) == [2 * size for size in skips]
    assert skipping(pipepart.planning.estimate(profile, 4).at(4)) == [size // 2 for size in skips]
    assert profile.graph.edges["down.0", "up.2"]["bytes"] == 2 * skips[0]
    plan = pipepart.plan(profile, Cluster.virtual(6, threads=1), schedule="1f1b", micro_batches=2, stages=6)
    ways = {way.maker: way for way in value_ways(plan)}
    deepest = ways["down.0"]  # which the last block up takes
    assert deepest.bytes == skips[0]
    assert "down.0" in plan.stages[deepest.stages[0]].layers
    assert "up.2" in plan.stages[deepest.stages[-1]].layers
    with Pipeline(model, plan, F.mse_loss, trace=True) as pipe:
        pipe.step(x, target=y)
        assert pipe.last_trace is not None
        travelled: Counter[tuple[int, int]] = Counter()
        for one in pipe.last_trace.transfers:
            if str(one.kind) == "F" and one.micro_batch == 0:
                travelled[one.source, one.target] += int(one.bytes)
    simulated = [one for one in plan.simulate().transfers if str(one.kind) == "F" and one.micro_batch == 0]
    assert {(one.source, one.target): one.bytes for one in simulated if one.bytes} == travelled
    planned = {(index, index + 1): stage.output_bytes for index, stage in enumerate(plan.stages[:-1])}
    planned |= {
        (index, skip.target): skip.bytes for index, stage in enumerate(plan.stages) for skip in stage.skips
    }
    assert +travelled == {ends: size for ends, size in planned.items() if size}
