"""From a model to files and back to a pipeline: each noun may be saved, sent and loaded on the way."""

import pytest
import torch
from torch import nn

import pipepart
from tests.support import plain

pytestmark = pytest.mark.usefixtures("short_profiles")


def test_a_plan_from_files_trains_as_the_plain_model_and_a_fresh_copy_of_it(tmp_path):
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3)
    )
    reference = plain.twin(model)
    x, y = torch.randn(9, 4), torch.randint(3, (9,))
    pipepart.profile(
        model, x, loss_fn=nn.CrossEntropyLoss(), target=y, micro_batches=[2, 4], seconds=0.01
    ).save(tmp_path / "profile.json")
    pipepart.Cluster.virtual(3, memory="1GiB").save(tmp_path / "cluster.json")
    pipepart.plan(
        pipepart.Profile.load(tmp_path / "profile.json"),
        pipepart.Cluster.load(tmp_path / "cluster.json"),
        schedule="auto",
        micro_batches=4,
    ).save(tmp_path / "plan.json")
    plan = pipepart.Plan.load(tmp_path / "plan.json")
    with pipepart.Pipeline(model, plan, loss_fn=nn.CrossEntropyLoss()) as pipe:
        assert pipe.plan == plan
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.CrossEntropyLoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    fresh = nn.Sequential(
        nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3)
    )
    with pipepart.Pipeline(fresh, plan) as pipe, torch.no_grad():
        plain.assert_near(pipe(x), fresh(x), 1e-6)


def test_memory_that_does_not_suffice_says_so_before_anything_runs():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    x = torch.randn(8, 64)
    with pytest.raises(pipepart.InfeasiblePlanError, match=r"stage \d .* short by \d+ bytes") as caught:
        pipepart.Pipeline.auto(
            model,
            x,
            target=x,
            loss_fn=nn.MSELoss(),
            devices=pipepart.Cluster.virtual(2, memory="10KiB"),
            micro_batches=2,
        )
    assert caught.value.deficit_bytes > 0
    assert model.state_dict()["1.num_batches_tracked"] == 0
