"""Which actions a step runs, of those that a plan has."""

import torch
from torch import nn

import schedules
from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import plan_by_hand


def test_sends_and_receives_of_a_plan_are_left_to_the_transport():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    reference = plain.twin(model)
    plan = plan_by_hand(["0", "1", "2"], [1], micro_batches=4)
    written = schedules.insert_messages(schedules.build("1f1b", devices=2, micro_batches=4))
    rows = tuple(tuple(map(str, row)) for row in written.actions)
    assert any("SEND_F" in action for row in rows for action in row)
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    with Pipeline(
        model, plan.model_copy(update={"schedule": "search", "actions": rows}), nn.MSELoss()
    ) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
