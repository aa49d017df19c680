"""The memory of a plan: what each stage holds, to the byte, what fits, and when stashes go to the host."""

from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Cluster, InfeasiblePlanError, Plan, Profile
from pipepart.capture import SharedTensor
from tests.planning.problems import Layer, profile_of

pytestmark = pytest.mark.usefixtures("no_suggestions")


def test_a_measured_model_holds_its_parameters_gradients_and_states():
    """A layer used twice is held once."""
    twice = nn.Linear(16, 16)
    model = nn.Sequential(nn.Linear(16, 16), twice, nn.ReLU(), twice, nn.Linear(16, 16).requires_grad_(False))
    profile = pipepart.profile(model, torch.randn(8, 16), optimizer="adam", seconds=0)
    plan = pipepart.plan(profile, Cluster.virtual(2), schedule="1f1b", stages=2)
    size = (16 * 16 + 16) * 4
    assert sum(stage.static_bytes for stage in plan.stages) == 2 * 4 * size + size


def test_a_loss_of_the_whole_batch_counts_all_outputs_twice(tmp_path):
    """In parts and gathered, on the last stage: also in a plan that is read from a file, and in one made from it."""
    profile = profile_of([Layer(parameters=1, output=7, peak=3)] * 4, [4])
    plain = pipepart.plan(profile, Cluster.virtual(2), schedule="gpipe")
    plan = pipepart.plan(profile, Cluster.virtual(2), schedule="gpipe", reduction="batch")
    outputs = 4 * 2 * 7
    first, last = plain.stages
    assert first.workspace_bytes == plan.stages[0].workspace_bytes
    assert plan.stages[1].workspace_bytes == tuple(size + outputs for size in last.workspace_bytes)
    assert plan.refreshed() is plan
    plan.save(tmp_path / "plan.json")
    assert pipepart.Plan.load(tmp_path / "plan.json") == plan
    limits = Cluster.virtual(2, memory=list(plain.predicted.memory_bytes))
    with pytest.raises(InfeasiblePlanError):
        pipepart.plan(profile, limits, schedule="gpipe", stages=2, reduction="batch", recompute="never")


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


@pytest.mark.parametrize(
    ("schedule", "versions"),
    [("1f1b", [1, 1, 1, 1]), ("pipedream", [4, 3, 2, 1]), ("pipedream-2bw", [2, 2, 2, 2])],
)
def test_a_stage_holds_as_many_versions_of_its_weights_as_the_papers_say(schedule, versions):
    profile = profile_of([Layer(parameters=1000)] * 4, [8], optimizer="sgd")
    plan = pipepart.plan(profile, Cluster.virtual(4), schedule=schedule)
    held = [count * 1000 + 1000 for count in versions]
    assert [stage.static_bytes for stage in plan.stages] == held
    assert list(plan.predicted.memory_bytes) == held
    short = Cluster.virtual(4, memory=[held[0] - 1, *held[1:]])
    with pytest.raises(InfeasiblePlanError, match="short by 1 byte "):
        pipepart.plan(profile, short, schedule=schedule, stages=4, recompute="never")


def test_the_cut_has_room_for_all_versions_of_the_weights():
    """Two layers on the first device take 4,000 bytes with one version of their weights, and 6,000 with two."""
    layers = [*[Layer(parameters=1000)] * 3, Layer(parameters=900)]
    profile, cluster = profile_of(layers, [8], optimizer="sgd"), Cluster.virtual(2, memory=5999)
    plan = pipepart.plan(profile, cluster, schedule="pipedream", stages=2, recompute="never")
    assert [len(stage.layers) for stage in plan.stages] == [1, 3]
    assert plan.fits


# For one micro-batch: a forward of a second, a backward of two, and 100 bytes to keep.
LAYER = Layer(forward=8.0, backward_input=8.0, backward_weight=8.0, saved=100, output=10)
PROFILE = profile_of([LAYER] * 4, micro_batches=(8,))


def cluster(memory: str = "1000B", host_link: float | None = 200.0, devices: int = 2) -> Cluster:
    return Cluster.parse([memory] * devices, host_link=host_link)


def planned(where: Cluster, **options: Any) -> Plan:
    return pipepart.plan(PROFILE, where, **{"schedule": "gpipe", **options})


def modes(made: Plan) -> list[str]:
    return [stage.mode for stage in made.stages]


def test_a_fast_link_is_better_than_a_second_forward():
    """A stash is copied in a second, beside actions of two and four seconds: nothing waits."""
    free = planned(cluster("10000B"))
    made = planned(cluster())
    assert modes(free) == ["never", "never"]
    assert modes(made) == ["offload", "offload"]
    assert made.predicted.step_seconds == pytest.approx(free.predicted.step_seconds)
    assert max(made.predicted.memory_bytes) <= 1000 < min(free.predicted.memory_bytes)
    assert made.predicted.step_seconds < planned(cluster(), offload="never").predicted.step_seconds
    assert modes(planned(cluster(), offload="never")) == ["except-last", "except-last"]


def test_a_slow_link_is_worse_than_a_second_forward():
    slow = cluster(host_link=30.0)
    made, never = planned(slow), planned(slow, recompute="never")
    assert "offload" not in modes(made)
    assert modes(never) == ["offload", "offload"]
    assert never.predicted.step_seconds > made.predicted.step_seconds
    copy = (never.stages[0].stash_bytes - never.stages[0].boundary_bytes) / 30
    assert never.predicted.step_seconds > 2 * 8 * copy  # the queue of a device carries each stash twice


def test_without_a_link_or_if_it_is_forbidden_nothing_is_offloaded():
    for where, options in ((cluster(host_link=None), {}), (cluster(), {"offload": "never"})):
        with pytest.raises(InfeasiblePlanError, match="does not fit"):
            planned(where, recompute="never", **options)


def test_all_stages_offload_if_that_is_asked_for():
    """The worker of a virtual device copies by itself and is busy meanwhile, at 10 GB/s."""
    assert modes(planned(cluster("10000B"), offload="stash")) == ["offload", "offload"]
    layer = Layer(forward=8.0, backward_input=8.0, backward_weight=8.0, saved=10**9)
    made = pipepart.plan(profile_of([layer] * 2, (8,)), Cluster.virtual(2), schedule="gpipe", offload="stash")
    assert modes(made) == ["offload", "offload"]
    costs = made.stage_costs()
    assert costs.host_copy == (0, 0)
    assert costs.offload == pytest.approx((0.1, 0.1), rel=1e-2)
