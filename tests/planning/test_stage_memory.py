"""What counts in a stage's memory: buffers, and shared tensors once for each later stage that holds a copy."""

import pytest

import pipepart
from pipepart import Cluster, InfeasiblePlanError, Profile
from pipepart.capture import SharedTensor
from tests.planning.problems import Layer, profile_of


def with_layers(profile: Profile, **updates: dict) -> Profile:
    """The profile with other fields of some layers, by their names."""
    layers = [info.model_copy(update=updates.get(info.name, {})) for info in profile.layers]
    return profile.model_copy(update={"layers": tuple(layers)})


def test_buffers_count():
    """A mask of 800 bytes: the stage that holds it needs them, and does not fit without."""
    profile = with_layers(profile_of([Layer(parameters=10)] * 2, [2]), layer1={"buffer_bytes": 800})
    plan = pipepart.plan(profile, Cluster.virtual(2), schedule="1f1b")
    assert [stage.static_bytes for stage in plan.stages] == [40, 840]
    assert [stage.parameter_bytes for stage in plan.stages] == [10, 10]
    assert plan.predicted.memory_bytes == (40, 840)
    with pytest.raises(InfeasiblePlanError, match="short by 1 byte "):
        pipepart.plan(profile, Cluster.virtual(2, memory=839), schedule="1f1b")


def test_a_later_stage_copies_each_shared_tensor_once():
    """Two layers of the second stage share one tensor of layer 0 and one of layer 1: 7 + 7 and 5 + 0 bytes."""
    weight = SharedTensor(layer="layer0", name="weight", bytes=7, gradient_bytes=7)
    table = SharedTensor(layer="layer1", name="table", bytes=5)
    profile = with_layers(
        profile_of([Layer(parameters=10)] * 4, [2]),
        layer2={"shared": (weight, table)},
        layer3={"shared": (weight,)},
    )
    options = {"schedule": "1f1b", "allow_split_ties": True}
    plan = pipepart.plan(profile, Cluster.virtual(2), cut_before=["layer2"], **options)
    assert [stage.static_bytes for stage in plan.stages] == [80, 80 + 14 + 5]
    three = pipepart.plan(profile, Cluster.virtual(3), cut_before=["layer1", "layer3"], **options)
    assert [stage.static_bytes for stage in three.stages] == [40, 80 + 14, 40 + 14]
    one = pipepart.plan(profile, Cluster.virtual(1), **options)
    assert one.stages[0].static_bytes == 160
