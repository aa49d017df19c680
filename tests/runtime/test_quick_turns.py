"""While workers run beside other threads, all take quick turns; before and after, as the user has set it."""

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chains import cut_by_hand


def approx(seconds: float) -> Any:
    """To the microsecond, which is what the interpreter keeps."""
    return pytest.approx(seconds, abs=1.1e-6)


class Notes(nn.Module):
    """Notes the switch interval at each forward, and fails or sets another one if told to."""

    def __init__(self, does: Any = None) -> None:
        super().__init__()
        self.seen: list[float] = []
        self._does = does

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(sys.getswitchinterval())
        if self._does:
            self._does()
        return x


@pytest.fixture(autouse=True)
def _beside_another_thread():
    before, ends = sys.getswitchinterval(), threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    yield
    ends.set()
    other.join()
    sys.setswitchinterval(before)


def step(layer: nn.Module) -> None:
    with cut_by_hand(
        nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)), [1], loss_fn=nn.MSELoss()
    ) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_the_interval_is_short_in_a_step_and_then_what_it_was() -> None:
    sys.setswitchinterval(0.0125)
    layer = Notes()
    step(layer)
    assert max(layer.seen) == approx(2e-4)
    assert sys.getswitchinterval() == approx(0.0125)


def test_workers_alone_keep_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hand over at each operation of torch anyway, and shorter turns cost a step of tiny layers 15 %."""
    threads = threading.enumerate
    monkeypatch.setattr(
        threading,
        "enumerate",
        lambda: [
            one for one in threads() if one.name.startswith("pipepart") or one is threading.main_thread()
        ],
    )
    sys.setswitchinterval(0.0125)
    layer = Notes()
    step(layer)
    assert layer.seen == [approx(0.0125)] * 3


def test_a_shorter_one_of_the_users_stays() -> None:
    sys.setswitchinterval(1e-5)
    layer = Notes()
    step(layer)
    assert max(layer.seen) == approx(1e-5)


def test_what_the_user_sets_meanwhile_stays() -> None:
    step(Notes(lambda: sys.setswitchinterval(0.007)))
    assert sys.getswitchinterval() == approx(0.007)
