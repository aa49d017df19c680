"""``Pipeline.auto`` reports mistakes in its arguments before it measures anything."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart


class NeverRuns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model was run")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "1f1c"}, "schedule '1f1c'"),
        ({"schedule": "pipedream"}, "pipedream"),
        ({"recompute": "often"}, "got 'often'"),
        ({"replicas": 3}, "replicas must be between 1 and the number of devices, 2"),
        ({"optimizer_state": "lion"}, "optimizer 'lion' is not known"),
        ({"micro_batches": 0}, "micro_batches"),
    ],
)
def test_a_mistake_is_reported_before_the_model_runs(options: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), NeverRuns())
    given: dict[str, Any] = {"loss_fn": nn.MSELoss(), "target": torch.zeros(8, 4), "devices": 2}
    with pytest.raises(ValueError, match=says):
        pipepart.Pipeline.auto(model, torch.zeros(8, 4), **given | options)
