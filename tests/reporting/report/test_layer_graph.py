"""The layer graph of the report: which boxes and edges there are, and that boxes do not overlap."""

from itertools import combinations, pairwise

import pytest

from pipepart import Cluster, Plan, plan
from pipepart.profiling import LiveValue
from pipepart.reporting.report.graph.layers import BOX_HEIGHT, BOX_WIDTH, Layout, lay_out
from pipepart.reporting.report.graph.nodes import Edge, edges_of, nodes_of
from pipepart.reporting.report.graph.stages import lay_out_stages
from tests.support.made_profiles import made_profile


def planned(names: list[str], values: tuple[LiveValue, ...] = (), stages: int = 2) -> Plan:
    """A plan of layers that all take 3 ms, in stages of equally many."""
    # What leaves a layer is all that is used behind it.
    outputs = [
        sum(value.bytes for value in values if value.layers[0] <= at < value.layers[-1]) or 128
        for at in range(len(names))
    ]
    profile = made_profile(names, micro_batches=(2,), output_bytes=outputs, values=values)
    cluster = Cluster.virtual(stages)
    firsts = [names[len(names) * stage // stages] for stage in range(1, stages)]
    return plan(profile, cluster, schedule="1f1b", cut_before=firsts, micro_batches=2, seconds=0.5)


def drawn(made: Plan, folded: bool) -> tuple[list[str], list[Edge], Layout]:
    assert made.profile is not None
    nodes = nodes_of(made, made.profile, folded)
    edges = edges_of(made, made.profile, nodes)
    return [node.label for node in nodes], edges, lay_out(nodes, edges, len(made.stages))


def test_a_chain_has_an_edge_between_neighbours_and_one_is_cut():
    labels, edges, layout = drawn(planned(["a", "b", "c", "d"]), folded=False)
    assert labels == ["a", "b", "c", "d"]
    assert edges == [Edge(0, 1, 128), Edge(1, 2, 128), Edge(2, 3, 128)]
    assert [line.edge for line in layout.lines if line.is_cut] == [1]
    assert [x for x, _ in layout.places[:2]] == [layout.places[0][0]] * 2
    assert layout.places[2][0] > layout.places[0][0] + BOX_WIDTH


def test_values_that_skip_layers_are_edges_of_their_own_bytes():
    values = (
        LiveValue(bytes=10, layers=(0, 1, 3)),
        LiveValue(bytes=20, layers=(1, 2)),
        LiveValue(bytes=40, layers=(2, 3)),
        LiveValue(bytes=5, layers=(0, 2), is_argument=True),
    )
    made = planned(["a", "b", "c", "d"], values)
    _, edges, layout = drawn(made, folded=False)
    assert edges == [Edge(0, 1, 10), Edge(0, 3, 10), Edge(1, 2, 20), Edge(2, 3, 40)]
    widths = {line.edge: line.width for line in layout.lines if line.is_cut}
    assert list(widths) == [1, 2]
    assert widths[1] < widths[2]


def test_folded_blocks_are_one_box_a_stage():
    made = planned([f"layers.{number}" for number in range(1000)], stages=4)
    labels, edges, layout = drawn(made, folded=True)
    assert labels[0].startswith("layers.0 – ")
    assert len(labels) == 4
    assert edges == [Edge(0, 1, 128), Edge(1, 2, 128), Edge(2, 3, 128)]
    assert all(line.is_cut for line in layout.lines)


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (30, 2), (1000, 4), (128, 64)])
def test_boxes_do_not_overlap_and_lie_in_their_columns(layers: int, stages: int):
    made = planned([str(number) for number in range(layers)], stages=stages)
    assert made.profile is not None
    nodes = nodes_of(made, made.profile, folded=False)
    layout = lay_out(nodes, edges_of(made, made.profile, nodes), stages)
    assert len(set(layout.places)) == layers
    places = sorted(layout.places)
    for (x, y), (next_x, next_y) in pairwise(places):
        assert next_x >= x + BOX_WIDTH or (next_x == x and next_y >= y + BOX_HEIGHT)
    for node, (x, y) in zip(nodes, layout.places, strict=True):
        column = layout.columns[node.stage]
        assert column.x < x < x + BOX_WIDTH < column.x + column.width
        assert column.top < y < y + BOX_HEIGHT <= column.top + column.height
        assert 0 < column.x < column.x + column.width < layout.width
        assert column.top + column.height < layout.height
    for one, other in combinations(layout.columns, 2):
        apart = one.x + one.width <= other.x or other.x + other.width <= one.x
        assert apart or one.top + one.height <= other.top


def test_the_edges_of_stages_are_what_they_send():
    values = (
        LiveValue(bytes=10, layers=(0, 1, 2, 3)),
        LiveValue(bytes=20, layers=(0, 5)),
        LiveValue(bytes=40, layers=(3, 4)),
    )
    made = planned(list("abcdef"), values, stages=3)
    edges = lay_out_stages(made).edges
    # However many layers of a stage use a value, it is sent there once.
    assert [(edge.source, edge.target, edge.bytes) for edge in edges] == [(0, 1, 10), (0, 2, 20), (1, 2, 40)]
