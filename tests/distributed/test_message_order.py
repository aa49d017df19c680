"""A failure ends the waits of all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipepart.ranks import RankError
from tests.distributed.test_as_in_one_process import without_tags
from tests.distributed.training import TIMEOUT
from tests.support.chains import cut_by_hand
from tests.support.ranks import Failed, ranks

_SLOW_SECONDS = 60.0  # of a layer, whose end nobody waits for


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


def failing() -> str:
    def fail(call: int) -> None:
        if call == 8:
            raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(2, 2), Doing(fail), nn.Linear(2, 2))
    x = torch.ones(9, 2)
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), timeout=TIMEOUT) as pipe:
        for _ in range(2):  # from the second on in one order
            pipe.step(x, target=x)
        with pytest.raises(Exception, match="on purpose") as raised:
            pipe.step(x, target=x)
        return type(raised.value).__name__


def test_a_failure_ends_the_step_on_all_ranks():
    assert ranks(3).run(without_tags, failing) == ["RankError", "ValueError", "RankError"]


def fails_beside_a_wait() -> float:
    """Stage 0 fails when stage 1, beside it, waits for gradients that stage 2 does not send."""
    unsent = threading.Lock()  # layers that share Python values need a profile
    unsent.acquire()

    def fail(call: int) -> None:
        if call == 2:
            assert unsent.acquire(timeout=_SLOW_SECONDS)
            time.sleep(0.3)  # until the other worker waits
            raise ValueError("out of ideas")

    def send(call: int) -> None:
        if unsent.locked():
            unsent.release()

    acts = [fail, send, lambda _: time.sleep(_SLOW_SECONDS), lambda _: None]
    model = nn.Sequential(*(Doing(act) for act in acts))
    began = time.monotonic()
    with cut_by_hand(model, [1, 2, 3], loss_fn=nn.MSELoss(), micro_batches=2) as pipe:
        with pytest.raises((ValueError, RankError), match="out of ideas"):
            pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
        return time.monotonic() - began


def test_a_worker_that_waits_for_another_rank_ends_with_the_failure_beside_it():
    found = ranks(2).outcomes(fails_beside_a_wait)
    assert not [one for one in found if isinstance(one, Failed)], found
    assert max(found) < _SLOW_SECONDS / 2
