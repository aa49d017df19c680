"""Out of memory: raises torch's error with a list of held tensors, frees them, and the next step works."""

import gc
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Pipeline
from pipepart.autograd.split_backward import WeightGradients
from pipepart.runtime.stage_run import Stash
from pipepart.units import format_bytes
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.in_backward import calls_in_backward
from tests.support.two_parts import Calls, splits

pytestmark = pytest.mark.usefixtures("short_profiles")

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(1, -1, 32).view(8, 4)


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


class Large(nn.Module):
    """Saves a tensor for its backward and counts which of them are alive; runs out of memory where told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_at: int | None = None
        self.where = "forward"
        self.calls = self.backwards = 0
        self.alive: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        call, self.calls = self.calls, self.calls + 1
        inner = x.exp()
        self.alive.append(weakref.ref(inner.untyped_storage()))
        if self.where == "forward" and call == self.fails_at:
            raise torch.OutOfMemoryError("device is full")
        y = (inner * inner).log()
        if y.requires_grad:
            y.register_hook(self.go_back)
        return y

    def go_back(self, gradient: Tensor) -> None:
        call, self.backwards = self.backwards, self.backwards + 1
        if self.where == "backward" and call == self.fails_at:
            raise torch.OutOfMemoryError("device is full")


@pytest.fixture(autouse=True)
def _nothing_collects() -> Iterator[None]:
    """What is let go of must not have to wait for the collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("schedule", "recompute", "where", "stage", "call"),
    [
        ("1f1b", "never", "forward", 0, 2),
        ("1f1b", "always", "forward", 2, 2),
        ("gpipe", "never", "backward", 2, 0),
        ("zb-h1", "never", "forward", 2, 0),
        ("zb-h1", "never", "backward", 0, 2),
    ],
)
def test_nothing_of_a_step_lives_in_the_error(schedule, recompute, where, stage, call):
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), Large())))
    layer = model[2 * stage + 1]
    assert isinstance(layer, Large)
    layer.where, layer.fails_at = where, call
    x = X.clone().requires_grad_()
    how: dict[str, Any] = {"schedule": schedule, "recompute": recompute, "timeout": 60}
    with cut_by_hand(model, [2, 4], loss_fn=nn.MSELoss(), micro_batches=4, **how) as pipe:
        with pytest.raises(torch.OutOfMemoryError, match="device is full") as caught:
            pipe.step(x, target=Y)
        if where == "forward":
            assert f"layer '{2 * stage + 1}' (Large)" in notes(caught.value)
        assert f"pipepart: on stage {stage} of 3 on virtual:{stage}, micro-batch " in notes(caught.value)
        saved = [ref for one in model if isinstance(one, Large) for ref in one.alive]
        assert saved
        assert [ref for ref in saved if ref() is not None] == []
        layer.fails_at = None
        plain.check_step(pipe, X[:4], Y[:4], nn.MSELoss(), 4)


def test_nothing_of_a_step_lives_in_the_cause_of_the_error():
    """Not even in a frame that was looked into."""
    alive: list[weakref.ref[Any]] = []

    def allocate(x: Tensor) -> Tensor:
        inner = x.exp()
        alive.append(weakref.ref(inner.untyped_storage()))
        raise RuntimeError("no block is large enough")

    def explain(x: Tensor) -> Tensor:
        try:
            return allocate(x)
        except RuntimeError as error:
            looked_at = [
                name for frame, _ in traceback.walk_tb(error.__traceback__) for name in frame.f_locals
            ]
            assert "inner" in looked_at
            raise torch.OutOfMemoryError("device is full") from error

    model = nn.Sequential(nn.Linear(4, 4), Calls(explain))
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=4) as pipe:
        with pytest.raises(torch.OutOfMemoryError, match="device is full") as caught:
            pipe.step(X, target=Y)
        assert type(caught.value.__cause__) is RuntimeError
        assert [ref() for ref in alive] == [None]


def test_the_cpus_own_error_becomes_torchs():
    model = nn.Sequential(nn.Linear(4, 4), Calls(lambda x: x + torch.empty(10**15)))
    with (
        cut_by_hand(model, [1], loss_fn=nn.MSELoss(), reduction="mean") as pipe,
        pytest.raises(torch.OutOfMemoryError, match="can't allocate memory") as caught,
    ):
        pipe.step(X, target=Y)
    assert type(caught.value.__cause__) is RuntimeError
    assert "in the forward of layer '1' (Calls)" in notes(caught.value)


def test_the_error_says_what_the_plan_predicts():
    large = Large()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), large)
    profile = pipepart.profile(model, X, target=Y, loss_fn=nn.MSELoss(), micro_batches=4, seconds=0.01)
    cluster = pipepart.Cluster.virtual(2, memory="1MiB", threads=1)
    plan = pipepart.plan(profile, cluster, micro_batches=4, cut_before=["2"], schedule="gpipe")
    large.calls, large.fails_at = 0, 2
    with Pipeline(model, plan, nn.MSELoss()) as pipe, pytest.raises(torch.OutOfMemoryError) as caught:
        pipe.step(X, target=Y)
    peak = format_bytes(plan.predicted.memory_bytes[1])
    assert f"predicts at most {peak} on virtual:1, taken to have 1.0 MiB" in notes(caught.value)
    assert "plan with more micro-batches" in notes(caught.value)


def kept() -> list[Any]:
    """What any step has kept for its backwards."""
    return [one for one in gc.get_objects() if type(one) in (Stash, WeightGradients)]


@splits
def test_a_failed_step_leaves_no_stashes_and_no_weights_waiting():
    """Of any error, though its traceback is still there."""
    calls = iter(range(4))

    def fail() -> None:
        if next(calls) == 2:
            raise ValueError("on purpose")

    failing = Calls(lambda x: calls_in_backward(x, fail))
    model = nn.Sequential(nn.Linear(4, 4), failing, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    others = kept()  # by steps of other tests, as in threads that they gave up
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1") as pipe:
        with pytest.raises(ValueError, match="on purpose") as caught:
            pipe.step(X, target=Y)
        own = [type(one) for one in kept() if not any(one is other for other in others)]
        assert caught.value.__traceback__
    assert own in ([], [Stash])  # that of the backward that failed, in its frame
