"""Profiles with branches are planned: their layers in the best order, and values sent to the stages that use them."""

import io
import itertools
import random

import networkx as nx
import pytest

import schedules
from pipepart import Cluster, Pipeline, Plan, Profile, plan
from pipepart.planning import InfeasiblePlanError
from pipepart.planning.branched import linearized
from pipepart.reporting import plan_reports, show
from tests.planning.branched import branched
from tests.planning.problems import Layer


def random_graph(seed: int) -> tuple[list[Layer], list[tuple[int, int]]]:
    draw = random.Random(seed)
    count = draw.randint(4, 7)
    layers = [
        Layer(
            forward=draw.uniform(0.5, 3),
            backward_input=draw.uniform(0.5, 3),
            parameters=draw.randint(1, 9),
            trained=draw.random() < 0.8,
            output=draw.randint(0, 3),
            saved=draw.randint(0, 4),
        )
        for _ in range(count)
    ]
    edges = [(draw.randrange(later), later) for later in range(1, count)]
    edges += [
        pair for pair in itertools.combinations(range(count), 2) if pair not in edges and draw.random() < 0.2
    ]
    return layers, sorted(edges)


def bottlenecks(
    layers: list[Layer], edges: list[tuple[int, int]], stages: int, bandwidth: float
) -> list[float]:
    """The bottleneck of every cut of every topological order, each tensor sent from one stage that has it to the next.

    A hop costs both of its stages, there and back if a layer before the border is trained.
    """
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(range(len(layers)))
    found = []
    for order in nx.all_topological_sorts(graph):
        for inner in itertools.combinations(range(1, len(layers)), stages - 1):
            pieces = [order[start:end] for start, end in itertools.pairwise((0, *inner, len(layers)))]
            stage_of = {v: number for number, piece in enumerate(pieces) for v in piece}
            loads = [sum(layers[v].forward + layers[v].backward_input for v in piece) for piece in pieces]
            trained = [any(layers[v].trained for v in order[:border]) for border in inner]
            for v in graph:
                users = [stage_of[w] for w in graph[v]] or [stages - 1]  # the loss
                for one, other in itertools.pairwise(sorted({stage_of[v], *users})):
                    once = layers[v].output / bandwidth
                    loads[one] += 2 * once if trained[one] else once
                    loads[other] += 2 * once if trained[other - 1] else once
            found.append(max(loads))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_for_every_order_and_what_is_called_optimal_is(seed: int):
    layers, edges = random_graph(seed)
    stages = 2 + seed % 3
    cluster = Cluster.parse(["1GB"] * stages, link="4B/s")
    made = plan(branched(layers, edges), cluster, schedule="1f1b", stages=stages)
    every = bottlenecks(layers, edges, stages, 4.0)
    assert made.predicted.bottleneck_bound <= min(every) * (1 + 1e-9)
    assert min(every) <= made.predicted.bottleneck_seconds * (1 + 1e-9)
    assert any(made.predicted.bottleneck_seconds == pytest.approx(value, rel=1e-9) for value in every)
    if made.predicted.bottleneck_optimal:
        assert made.predicted.bottleneck_seconds == pytest.approx(min(every), rel=1e-9)


def test_stages_keep_the_order_of_the_edges():
    layers, edges = random_graph(1)
    made = plan(branched(layers, edges), Cluster.virtual(2))
    stage_of = {name: number for number, stage in enumerate(made.stages) for name in stage.layers}
    assert len(stage_of) == len(layers)
    assert all(stage_of[one] <= stage_of[other] for one, other in made.edges)


def two_branches() -> Profile:
    """A stem, two branches of three layers that alternate in the execution order, and a head; 8 micro-batches."""
    layers = [Layer(8, 8, output=1, parameters=1), *[Layer(16, 16, output=40) for _ in range(6)], Layer(8, 8)]
    # Each branch ends in a small tensor.
    layers[5] = layers[6] = Layer(16, 16, output=1)
    edges = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 7)]
    return branched(layers, edges, micro_batches=8)


def test_a_branch_is_kept_whole_where_the_execution_order_would_cut_both():
    cluster = Cluster.parse(["1GB", "1GB"], link="10B/s")
    made = plan(two_branches(), cluster, schedule="1f1b")
    assert [set(stage.layers) for stage in made.stages] in (
        [{"layer0", *names}, {"layer7", *others}]
        for names, others in itertools.permutations(
            [("layer1", "layer3", "layer5"), ("layer2", "layer4", "layer6")]
        )
    )
    # The small end of one branch and the output of the stem cross, there and back: 2 bytes at 10 bytes/s.
    assert made.predicted.bottleneck_seconds == pytest.approx(14 + 2 * 0.2)
    assert made.predicted.bottleneck_optimal


def test_a_value_costs_the_stages_that_make_or_use_it_only():
    # The output of layer 0 goes to layers 1 and 3, that of layer 1 to layer 2, which no value of layer 0 enters.
    layers = [Layer(2, 2, output=10, parameters=1), Layer(2, 2, output=1), Layer(2, 2, output=1), Layer(2, 2)]
    cluster = Cluster.parse(["1GB"] * 4, link="10B/s")
    made = plan(
        branched(layers, [(0, 1), (0, 3), (1, 2), (2, 3)]),
        cluster,
        schedule="1f1b",
        cut_before=["layer1", "layer2", "layer3"],
        recompute="never",
    )
    assert [stage.output_bytes for stage in made.stages] == [10, 1, 1, 0]
    assert [[(skip.target, skip.bytes) for skip in stage.skips] for stage in made.stages] == [
        [],
        [(3, 10)],
        [],
        [],
    ]
    # Forward and back: stage 1 gets the 10 bytes and sends them on beside its own output; stage 2 does not see them.
    assert [stage.transfer_seconds for stage in made.stages] == pytest.approx([2.0, 4.2, 0.4, 2.2])
    # What a stage sends past the next one waits there (10 bytes in stage 1), and the last stage keeps both inputs.
    assert [stage.stash_bytes for stage in made.stages] == [0, 20, 1, 11]


def test_edges_and_live_values_say_the_same():
    """A profile made by hand and one of a recorded model with the same values are planned by the same code."""
    layers = [Layer(1 + index % 3, 2, output=5 + index, parameters=2) for index in range(8)]
    edges = [(0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (4, 5), (5, 6), (6, 7), (1, 6)]
    by_hand = branched(layers, edges)
    recorded = linearized(by_hand, range(8))
    assert set(recorded.graph.edges) == set(by_hand.graph.edges)
    assert recorded.graph.edges["layer1", "layer6"]["bytes"] == 6
    cluster = Cluster.parse(["1GB"] * 3, link="10B/s")
    one, other = (
        plan(profile, cluster, schedule="1f1b", recompute="never") for profile in (by_hand, recorded)
    )
    assert one.stages == other.stages
    assert one.predicted.step_seconds == other.predicted.step_seconds


def test_explain_lists_the_largest_values_at_each_border_and_counts_the_others():
    # Nine layers whose outputs of 1 to 9 bytes all go to the last one.
    layers = [*[Layer(1, 1, output=index + 1) for index in range(9)], Layer(9, 9)]
    profile = branched(layers, [(index, 9) for index in range(9)])
    made = plan(profile, Cluster.parse(["1GB"] * 2), schedule="1f1b", cut_before=["layer9"])
    text = io.StringIO()
    show(*plan_reports(made), file=text)
    _, _, table = text.getvalue().partition("Live values that cross the borders of stages\n")
    rows = [line.split() for line in table.splitlines()[3:9]]
    assert rows[0] == ["0", "|", "1", "output", "of", "layer8", "9", "B", "layer9", "0", "→", "1"]
    assert [row[2:5] for row in rows[1:5]] == [
        [f"layer{index}", f"{index + 1}", "B"] for index in (7, 6, 5, 4)
    ]
    assert rows[5] == ["4", "more", "10", "B"]


def test_memory_decides_and_a_plan_that_cannot_fit_says_what_would():
    profile = branched([Layer(1, 1, parameters=100) for _ in range(4)], [(0, 1), (0, 2), (1, 3), (2, 3)])
    made = plan(profile, Cluster.parse(["800", "800"]), schedule="1f1b")
    assert all(size <= 800 for size in made.predicted.memory_bytes)
    with pytest.raises(InfeasiblePlanError):
        plan(profile, Cluster.parse(["799", "799"]), schedule="1f1b")


def test_layers_that_stay_together_stay_together():
    profile = two_branches()
    made = plan(profile, Cluster.virtual(2), colocate=[("layer1", "layer6")], schedule="1f1b")
    assert any({"layer1", "layer6"} <= set(stage.layers) for stage in made.stages)
    with pytest.raises(ValueError, match="layer9"):
        plan(profile, Cluster.virtual(2), colocate=[("layer1", "layer9")], schedule="1f1b")


def test_a_plan_with_branches_is_saved_and_simulated(tmp_path):
    profile = two_branches()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert list(profile.graph.edges)[:2] == [("layer0", "layer1"), ("layer0", "layer2")]
    made = plan(profile, Cluster.parse(["1GB", "1GB"], link="10B/s"))
    made.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == made
    assert schedules.simulate(read.build_schedule(), read.stage_costs()).makespan == pytest.approx(
        made.predicted.step_seconds
    )


def test_a_pipeline_of_a_model_with_branches_is_refused():
    import torch

    made = plan(two_branches(), Cluster.virtual(2))
    with pytest.raises(ValueError, match="model with branches"):
        Pipeline(torch.nn.Sequential(torch.nn.Linear(1, 1)), made, loss_fn=torch.nn.MSELoss())


def test_edges_that_are_no_graph_of_the_layers_are_refused():
    layers = [Layer(), Layer(), Layer()]
    with pytest.raises(ValueError, match="goes against the execution order"):
        branched(layers, [(1, 0)])
    with pytest.raises(ValueError, match=r"names 'layer7', which is no layer"):
        branched(layers, [(0, 7)])
    with pytest.raises(ValueError, match="is given twice"):
        branched(layers, [(0, 1), (0, 1)])
