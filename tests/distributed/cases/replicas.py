"""Trainings of replicas that do not all do the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.distributed.cases.models import CLASSES, Balanced, labelled
from tests.distributed.cases.registry import on
from tests.distributed.training import TIMEOUT, drawn_batches, gradients, trained
from tests.support.chains import plan_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.recorded import chain_for
from tests.support.replicas import cut_replicas


class Sometimes(nn.Module):
    """Uses a parameter for some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used if float(x.sum()) > 0 else x


@on(4)
def used_by_some_replicas() -> dict[str, Any]:
    model = nn.Sequential(linear(), Balanced(), Sometimes(), linear()).double()
    pipe = cut_replicas(model, [2], 2, loss_fn=nn.MSELoss(), micro_batches=2, timeout=TIMEOUT)
    return trained(pipe, drawn_batches([4, 2, 3, 4, 6]))


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.second(torch.tanh(self.first(x)))
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


@on(4)
def outputs_of_all_replicas() -> dict[str, Any]:
    """Outputs and gradients of the input reach every rank."""
    model = OwnLoss().double()
    x, y = labelled((7,))[0]
    chain = chain_for(model, (x, y), parts=3)
    plan = plan_by_hand([name for name, _ in chain.layers], [1], micro_batches=3, replicas=2)
    x.requires_grad_()
    with Pipeline(chain, plan, timeout=TIMEOUT) as pipe:
        loss, output = pipe.step(x, y, return_outputs=True)
        with torch.no_grad():
            called = pipe(x, y)
        found = {"loss": loss, "output": output, "called": called, "evaluated": pipe.evaluate(x, y)}
        return {**found, "input": x.grad, "gradients": gradients(pipe)}
