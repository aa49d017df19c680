"""A step that fails wakes every worker, whatever else goes wrong while it fails, and later steps run."""

import threading

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.runtime.stage_run import StageRun
from tests.support.chains import plan_by_hand

X, Y = torch.linspace(-1, 1, 64).view(16, 4), torch.zeros(16, 4)


class FailsAt(nn.Module):
    """Raises in one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.at = 0, -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise ValueError("on purpose")
        return x * 1


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """What threads report that they did not handle."""
    found: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    return found


@pytest.mark.parametrize("at", [2, 16], ids=["while the other stage computes", "while it waits"])
def test_an_error_within_the_failure_hangs_neither_this_step_nor_the_next(
    at: int, monkeypatch: pytest.MonkeyPatch, reported: list[BaseException | None]
) -> None:
    def held(run: StageRun) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    layer = FailsAt()
    model = nn.Sequential(nn.Linear(4, 4), layer)
    plan = plan_by_hand(["0", "1"], [1], micro_batches=16, schedule="gpipe")
    with Pipeline(model, plan, nn.MSELoss(), timeout=2) as pipe:
        layer.at = at
        monkeypatch.setattr(StageRun, "held", held)
        with pytest.raises(ValueError, match="on purpose"):
            pipe.step(X, target=Y)
        layer.at = -1
        assert pipe.step(X, target=Y).isfinite()
    assert [str(error) for error in reported] == ["dictionary changed size during iteration"]
