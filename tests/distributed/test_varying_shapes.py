"""Under torchrun a stage may pass tensors whose shapes depend on values, if the pipeline is told so."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from pipepart import Pipeline
from tests.distributed.training import TIMEOUT, adam, drawn_batches, gradients, trained
from tests.support.chains import cut_by_hand
from tests.support.pieces import linear
from tests.support.ranks import assert_as_in_one_process, ranks


class Picks(nn.Module):
    """Passes on the rows whose first number is positive, and which they were."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = (x[:, 0] > 0).nonzero().flatten()
        return x, rows


class Uses(nn.Module):
    """Adds a layer's output to the rows that were picked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, rows = given
        return x.index_add(0, rows, self.linear(x[rows]))


def cut(**options: Any) -> Pipeline:
    model = nn.Sequential(linear(), Picks(), Uses(), linear()).double()
    return cut_by_hand(model, [2, 3], loss_fn=nn.MSELoss(), timeout=TIMEOUT, **options)


def steps(schedule: str) -> dict[str, Any]:
    return trained(cut(schedule=schedule, varying_shapes=True), drawn_batches([9, 9, 9, 4, 9]))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_shapes_that_depend_on_values(schedule):
    assert_as_in_one_process(steps, 3, schedule)


def of_the_caller() -> dict[str, Any]:
    with cut(varying_shapes=True) as pipe:
        for x, y in drawn_batches([9, 9]):
            (pipe(x) - y).pow(2).mean().backward()
        return {"gradients": gradients(pipe)}


def test_a_loss_of_the_caller():
    assert_as_in_one_process(of_the_caller, 3)


def undeclared() -> str:
    with cut() as pipe:
        optimizer = adam(pipe.parameters())

        def train() -> None:
            for x, y in drawn_batches([9] * 5):
                pipe.step(x, target=y)
                optimizer.step()

        with pytest.raises(RuntimeError) as raised:
            train()
        return str(raised.value)


def test_they_are_refused_otherwise():
    for text in ranks(3).run(undeclared):
        assert "passes tensors of another form" in text
        assert "varying_shapes=True" in text
