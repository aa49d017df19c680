"""Plans of asynchronous schedules: the versions of the weights in their memory, and what is said of their numbers."""

import pytest

import pipepart
from pipepart import Cluster, Plan
from pipepart.planning.request import ASYNCHRONOUS, CHUNKS
from tests.planning.problems import Layer, profile_of

LAYERS = [Layer(parameters=1000, output=1) for _ in range(4)]
FROZEN = [Layer(parameters=1000, output=1, trained=index > 1) for index in range(4)]


def static_bytes(layers: list[Layer], schedule: str) -> list[int]:
    plan = pipepart.plan(profile_of(layers, [8], optimizer="sgd"), Cluster.virtual(4), schedule=schedule)
    return [stage.static_bytes for stage in plan.stages]


@pytest.mark.parametrize(
    ("schedule", "versions"),
    [("1f1b", [1, 1, 1, 1]), ("pipedream", [4, 3, 2, 1]), ("pipedream-2bw", [2, 2, 2, 2])],
)
def test_a_stage_holds_as_many_versions_of_its_weights_as_the_papers_say(schedule, versions):
    assert static_bytes(LAYERS, schedule) == [count * 1000 + 1000 for count in versions]


def test_weights_that_are_not_trained_are_there_once():
    assert static_bytes(FROZEN, "pipedream") == [1000, 1000, 2 * 1000 + 1000, 1000 + 1000]


def test_a_saved_plan_is_read_with_its_versions(tmp_path):
    plan = pipepart.plan(profile_of(LAYERS, [8]), Cluster.virtual(4), schedule="pipedream")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.asynchronous


def test_no_plan_is_asynchronous_unless_it_is_asked_for():
    assert not {*CHUNKS} & {*ASYNCHRONOUS}


def test_copies_of_the_model_do_not_train_asynchronously():
    with pytest.raises(ValueError, match="replicas would have to agree on their weights"):
        pipepart.plan(profile_of(LAYERS, [8]), Cluster.virtual(4), schedule="pipedream", replicas=2)
