"""An ``Accelerator`` prepares what is around a pipeline: loader, optimizer and scheduler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipepart

pytestmark = pytest.mark.usefixtures("short_profiles")

accelerate: Any = pytest.importorskip("accelerate")


def trained(piped: bool) -> list[torch.Tensor]:
    """Train for six batches, two to a step of the optimizer; return the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    data = torch.utils.data.TensorDataset(torch.randn(48, 6, dtype=torch.double), torch.randint(3, (48,)))
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    loader, optimizer, scheduler = accelerator.prepare(loader, optimizer, scheduler)
    loss_fn = nn.CrossEntropyLoss()
    x, y = next(iter(loader))
    pipe = pipepart.Pipeline.auto(model, x, target=y, loss_fn=loss_fn, devices=2, micro_batches=2)
    with pipe:
        for x, y in loader:
            with accelerator.accumulate(model):
                if piped:
                    pipe.step(x, target=y, loss_weight=1 / accelerator.gradient_accumulation_steps)
                else:
                    accelerator.backward(loss_fn(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return list(model.parameters())


def test_a_step_of_a_pipeline_stands_for_the_backward_of_an_accelerator():
    for ours, theirs in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
