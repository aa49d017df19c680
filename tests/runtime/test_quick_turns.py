"""While workers run beside other threads, all take quick turns; before and after, as the user has set it."""

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls


@pytest.fixture(autouse=True)
def _beside_another_thread():
    before, ends = sys.getswitchinterval(), threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    yield
    ends.set()
    other.join()
    sys.setswitchinterval(before)


def switch_intervals(sets: float | None = None) -> list[Any]:
    """Return those within each forward of a step, and behind it; a layer sets another one if told to."""
    seen: list[float] = []

    def note(x: Tensor) -> Tensor:
        seen.append(sys.getswitchinterval())
        if sets:
            sys.setswitchinterval(sets)
        return x

    model = nn.Sequential(nn.Linear(4, 4), Calls(note), nn.Linear(4, 4))
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    # To the microsecond, which is what the interpreter keeps.
    return [pytest.approx(seconds, abs=1.1e-6) for seconds in (*seen, sys.getswitchinterval())]


def test_the_interval_is_short_in_a_step_unless_the_user_sets_another_one() -> None:
    sys.setswitchinterval(0.0125)
    assert switch_intervals() == [2e-4, 2e-4, 2e-4, 0.0125]
    assert switch_intervals(sets=0.007) == [2e-4, 0.007, 0.007, 0.007]
    sys.setswitchinterval(1e-5)
    assert switch_intervals() == [1e-5] * 4


def test_workers_alone_keep_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hand over at each operation of torch anyway, and shorter turns cost a step of tiny layers 15 %."""
    threads, main = threading.enumerate, threading.main_thread()
    monkeypatch.setattr(
        threading,
        "enumerate",
        lambda: [one for one in threads() if one.name.startswith("pipe") or one is main],
    )
    sys.setswitchinterval(0.0125)
    assert switch_intervals() == [0.0125] * 4
