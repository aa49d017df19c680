"""A rank with several devices: the worker of one fails while another waits for a message of a further rank."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.ranks import RankError
from tests.support.chains import plan_by_hand
from tests.support.ranks import Failed, ranks

_SLOW_SECONDS = 12.0


class Doing(nn.Module):
    """Does something in each forward."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.act(self.calls)
        return self.linear(x)


def fails_beside_a_wait() -> float:
    """Stage 0 fails when stage 1, beside it, waits for gradients that stage 2 does not send."""
    sent = threading.Event()

    def fail(call: int) -> None:
        if call == 2:
            assert sent.wait(_SLOW_SECONDS)
            time.sleep(0.3)  # until the other worker waits
            raise ValueError("out of ideas")

    acts = [fail, lambda _: sent.set(), lambda _: time.sleep(_SLOW_SECONDS), lambda _: None]
    model = nn.Sequential(*(Doing(act) for act in acts))
    began = time.monotonic()
    with Pipeline(model, plan_by_hand(list("0123"), [1, 2, 3], micro_batches=2), nn.MSELoss()) as pipe:
        with pytest.raises((ValueError, RankError), match="out of ideas"):
            pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
        return time.monotonic() - began


def test_a_worker_that_waits_for_another_rank_ends_with_the_failure_beside_it():
    found = ranks(2).outcomes(fails_beside_a_wait)
    assert not [one for one in found if isinstance(one, Failed)], found
    assert max(found) < _SLOW_SECONDS / 2
