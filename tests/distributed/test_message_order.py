"""A failure ends the waits of all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.ranks import RankError
from tests.distributed.test_as_in_one_process import without_tags
from tests.distributed.training import TIMEOUT, drawn_batches
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.pieces import linear
from tests.support.ranks import Failed, ranks

_SLOW_SECONDS = 12.0


class FailsLater(nn.Module):
    """Raises in its eighth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = linear(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 8:
            raise ValueError("on purpose")
        return self.linear(x)


def failing() -> dict[str, Any]:
    model = nn.Sequential(linear(), FailsLater(), linear()).double()
    x, y = drawn_batches([9])[0]
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), timeout=TIMEOUT) as pipe:
        for _ in range(2):  # from the second on in one order
            pipe.step(x, target=y)
        with pytest.raises(Exception, match="on purpose") as raised:
            pipe.step(x, target=y)
        return {"error": type(raised.value).__name__}


def test_a_failure_ends_the_step_on_all_ranks():
    found = ranks(3).run(without_tags, failing)
    assert [one["error"] for one in found] == ["RankError", "ValueError", "RankError"]


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
    with Pipeline(model, plan_by_hand(list("0123"), [1, 2, 3], micro_batches=2), nn.MSELoss()) as pipe:
        with pytest.raises((ValueError, RankError), match="out of ideas"):
            pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
        return time.monotonic() - began


def test_a_worker_that_waits_for_another_rank_ends_with_the_failure_beside_it():
    found = ranks(2).outcomes(fails_beside_a_wait)
    assert not [one for one in found if isinstance(one, Failed)], found
    assert max(found) < _SLOW_SECONDS / 2
