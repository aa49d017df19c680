"""Values that several layers use: what they cost the stages, and how `explain` lists them; written out by hand."""

import io
import itertools
import json

import pytest

from pipepart import Cluster, Plan, Profile, plan
from pipepart.profiling import LiveValue, SavedTensor
from pipepart.reporting import plan_reports, show
from tests.planning.problems import Layer, profile_of


def with_values(layers: list[Layer], edges: list[tuple[int, int]]) -> Profile:
    """The profile of a recorded model in which layer j uses the output of layer i for each edge (i, j)."""
    profile = profile_of(layers, (1,))
    (costs,) = profile.costs
    users = {
        maker: tuple(user for _, user in pairs)
        for maker, pairs in itertools.groupby(edges, lambda edge: edge[0])
    }
    values = [LiveValue(bytes=layers[maker].output, layers=(maker, *after)) for maker, after in users.items()]
    saved = [
        SavedTensor(
            bytes=layers[maker].output,
            layers=(),
            input_of=tuple(range(maker + 1, after[-1] + 1)),
            passed_by=tuple(layer for layer in range(maker + 1, after[-1]) if layer not in after),
        )
        for maker, after in users.items()
    ]
    own = [SavedTensor(bytes=layer.saved, layers=(index,)) for index, layer in enumerate(layers)]
    sizes = [
        sum(value.bytes for value in values if value.layers[0] <= border < value.layers[-1])
        for border in range(len(layers) - 1)
    ]
    timed = [
        layer.model_copy(update={"output_bytes": size})
        for layer, size in zip(costs.layers, [*sizes, layers[-1].output], strict=True)
    ]
    costs = costs.model_copy(
        update={"layers": tuple(timed), "values": tuple(values), "saved": (*saved, *own)}
    )
    return profile.model_copy(update={"costs": (costs,)})


def test_a_value_costs_the_stages_that_make_or_use_it_only():
    # The output of layer 0 goes to layers 1 and 3, that of layer 1 to layer 2, which no value of layer 0 enters.
    layers = [Layer(2, 2, output=10, parameters=1), Layer(2, 2, output=1), Layer(2, 2, output=1), Layer(2, 2)]
    cluster = Cluster.parse(["1GB"] * 4, link="10B/s")
    made = plan(
        with_values(layers, [(0, 1), (0, 3), (1, 2), (2, 3)]),
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


def test_the_graph_of_a_profile_has_the_values_as_edges():
    layers = [Layer(output=5), Layer(output=6), Layer(output=7), Layer()]
    graph = with_values(layers, [(0, 1), (0, 3), (1, 2), (2, 3)]).graph
    assert list(graph.edges(data="bytes")) == [
        ("layer0", "layer1", 5),
        ("layer0", "layer3", 5),
        ("layer1", "layer2", 6),
        ("layer2", "layer3", 7),
    ]


def test_explain_lists_the_largest_values_at_each_border_and_counts_the_others():
    # Nine layers whose outputs of 1 to 9 bytes all go to the last one.
    layers = [*[Layer(1, 1, output=index + 1) for index in range(9)], Layer(9, 9)]
    profile = with_values(layers, [(index, 9) for index in range(9)])
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


@pytest.mark.parametrize("kind", [Profile, Plan])
def test_a_file_of_an_earlier_version_is_read_unless_it_has_edges(tmp_path, kind):
    profile = profile_of([Layer(parameters=1), Layer()], (1,))
    document = profile if kind is Profile else plan(profile, Cluster.virtual(2))
    read = json.loads(document.model_dump_json()) | {"edges": [["layer0", "layer1"]]}
    (tmp_path / "old.json").write_text(json.dumps(read))
    with pytest.raises(ValueError, match="edges: Extra inputs are not permitted"):
        kind.load(tmp_path / "old.json")
    document.save(tmp_path / "old.json")
    text = (tmp_path / "old.json").read_text()
    (tmp_path / "old.json").write_text(text.replace('"costs":', '"edges": [],\n "costs":'))
    assert kind.load(tmp_path / "old.json") == document
