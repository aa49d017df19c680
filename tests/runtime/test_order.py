"""Which actions a step runs, of those that a plan has."""

import torch
from torch import nn

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import plan_by_hand


def test_sends_and_receives_of_a_plan_are_left_to_the_transport():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    plan = plan_by_hand(["0", "1", "2"], [1], micro_batches=2)
    rows = (
        ("0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"),
        ("1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"),
    )
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    with Pipeline(
        model, plan.model_copy(update={"schedule": "search", "actions": rows}), nn.MSELoss()
    ) as pipe:
        plain.check_step(pipe, x, y, nn.MSELoss(), 2)
