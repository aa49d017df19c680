"""What a pipeline on faithful virtual devices says of their memory: each tensor as what it is."""

import gc

import torch
from torch import nn

import pipepart
from pipepart import faithful
from tests.support.chains import plan_by_hand


def test_parameters_and_gradients_and_the_state_of_optimizers_are_told_apart():
    gc.collect()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 32))
    cluster = pipepart.Cluster.of(["vdev:0", "vdev:1"])
    plan = plan_by_hand([str(index) for index in range(4)], [2], micro_batches=2)
    homes = [device.name for device in cluster.devices]
    stages = [
        stage.model_copy(update={"device": home}) for stage, home in zip(plan.stages, homes, strict=True)
    ]
    plan = plan.model_copy(update={"cluster": cluster, "stages": tuple(stages)})
    state = [4 * (64 * 64 + 64), 4 * (64 * 4 + 64 * 32 + 32) + 8]
    parameters = [4 * (64 * 64 + 64), 4 * (64 * 2 + 64 * 32 + 32)]
    before = [faithful.memory(f"vdev:{index}").by_category for index in (0, 1)]

    def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def more(pipe: pipepart.Pipeline, category: str) -> list[int]:
        uses = [pipe.memory()[device.name].by_category for device in cluster.devices]
        return [now.get(category, 0) - then.get(category, 0) for now, then in zip(uses, before, strict=True)]

    with pipepart.Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=momentum) as pipe:
        assert more(pipe, "parameters") == state
        assert more(pipe, "gradients") == [0, 0]
        for _ in range(2):
            pipe.step(torch.randn(8, 64), target=torch.randn(8, 32))
        assert more(pipe, "parameters") == state
        assert more(pipe, "gradients") == parameters
        assert more(pipe, "optimizer") == parameters
        peaks = [pipe.memory()[device.name].peak for device in cluster.devices]
        assert all(peak > sum(sizes) for peak, sizes in zip(peaks, (state, parameters), strict=True))
