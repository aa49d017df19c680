"""Layers that share a parameter: kept together where that can be, parted where it cannot and the user lets them."""

from random import Random

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Cluster, InfeasiblePlanError, Profile
from pipepart.capture import SharedTensor
from tests.planning.problems import Layer, profile_of
from tests.support import plain

pytestmark = pytest.mark.usefixtures("short_profiles")


def tied(shared_bytes: int = 40, memory_layers: int = 6) -> Profile:
    """A chain whose last layer holds the parameter of the first."""
    layers = [Layer(parameters=10, output=5) for _ in range(memory_layers)]
    layers[-1] = Layer(output=5, shares_with=(0,))
    profile = profile_of(layers, [4])
    half = shared_bytes // 2
    tie = SharedTensor(layer="layer0", name="weight", bytes=half, gradient_bytes=half)
    infos = [*profile.layers[:-1], profile.layers[-1].model_copy(update={"shared": (tie,)})]
    return profile.model_copy(update={"layers": tuple(infos)})


def test_they_stay_together_unless_that_is_allowed():
    cluster = Cluster.virtual(2)
    assert len(pipepart.plan(tied(), cluster, schedule="1f1b").stages) == 1
    assert len(pipepart.plan(tied(), cluster, schedule="1f1b", allow_split_ties=True).stages) == 2


def test_they_stay_together_where_a_cut_into_as_many_stages_keeps_them():
    layers = [Layer(), Layer(), Layer(forward=9), Layer(shares_with=(1,)), Layer()]
    for allow_split_ties in (False, True):
        plan = pipepart.plan(
            profile_of(layers), Cluster.virtual(3), schedule="1f1b", allow_split_ties=allow_split_ties
        )
        assert [len(stage.layers) for stage in plan.stages] == [1, 3, 1]


@pytest.mark.parametrize("seed", range(2))
def test_the_joint_search_splits_no_tie_that_as_many_stages_keep_together(seed):
    pick = Random(seed)
    layers = [Layer(forward=pick.uniform(0.5, 2), output=5) for _ in range(8)]
    layers[4] = Layer(forward=1, output=5, shares_with=(2,))
    plan = pipepart.plan(profile_of(layers, [8]), Cluster.virtual(2), allow_split_ties=True)
    (together,) = [stage for stage in plan.stages if "layer4" in stage.layers]
    assert len(plan.stages) > 6 or "layer2" in together.layers


def test_a_stage_counts_its_copy_of_the_parameter_to_the_byte():
    """Five layers of 10 bytes with gradient and Adam's state, and a copy of 40 bytes with its gradient behind."""
    free = pipepart.plan(tied(), Cluster.parse(["1GiB"] * 2), schedule="gpipe", allow_split_ties=True)
    assert sum(stage.static_bytes for stage in free.stages) == 5 * 10 * 4 + 40
    assert free.stages[-1].static_bytes == (len(free.stages[-1].layers) - 1) * 40 + 40
    need = max(free.predicted.memory_bytes)
    options = {"schedule": "gpipe", "allow_split_ties": True, "recompute": "never", "stages": 2}
    assert pipepart.plan(tied(), Cluster.parse([f"{need}B"] * 2), **options).stages == free.stages
    with pytest.raises(InfeasiblePlanError):
        pipepart.plan(tied(shared_bytes=400), Cluster.parse([f"{need}B"] * 2), **options)


def test_a_tied_embedding_and_head_train_on_two_devices():
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11, bias=False))
    tied_weight = model.get_submodule("0").get_parameter("weight")
    model[3].weight = tied_weight
    model.double()
    x, y = torch.randint(11, (8,)), torch.randint(11, (8,))
    twin = plain.twin(model)
    plain.micro_batched_step(twin, x, y, nn.CrossEntropyLoss(), 4)
    profile = pipepart.profile(model, x, target=y, loss_fn=nn.CrossEntropyLoss(), micro_batches=4)
    assert profile.layers[3].shared[0].bytes == tied_weight.nbytes
    plan = pipepart.plan(profile, Cluster.virtual(2), schedule="1f1b", stages=2, allow_split_ties=True)
    with pipepart.Pipeline(model, plan, nn.CrossEntropyLoss()) as pipe:
        pipe.step(x, target=y)
    plain.assert_same(plain.gradients(model), plain.gradients(twin))
