"""A step in which nothing goes on any more ends with word of who waits for whom, and never hangs."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.runtime.failure.stalled import StepTimeoutError
from tests.support import plain
from tests.support.chains import plan_by_hand
from tests.support.in_backward import calls_in_backward
from tests.support.two_parts import Calls

SECONDS = 1.5  # in which a busy machine gets to each action of a small step
X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.zeros(8, 4)


class Stuck(nn.Module):
    """Waits in one call until it is let go."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0
        self.released = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        call, self.calls = self.calls, self.calls + 1
        self.wait(call)
        return x * 1

    def wait(self, call: int) -> None:
        if call == self.at:
            assert self.released.wait(60)


@pytest.fixture(autouse=True, scope="module")
def _torch_is_warm() -> None:
    """The first of some operations has torch import modules, which takes longer than these tests wait."""
    with cut(Stuck(at=-1), timeout=None) as pipe:
        pipe.step(X, target=Y)


def cut(stuck: nn.Module, timeout: float | None = SECONDS, **how: Any) -> Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), stuck, nn.Linear(4, 4))
    plan = plan_by_hand(["0", "1", "2", "3"], [2], micro_batches=4, **how)
    return Pipeline(model, plan, nn.MSELoss(), timeout=timeout)


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pipepart-")}


def test_a_forward_that_does_not_return():
    """Its layer is named and its stack shown; the other device waits for it."""
    stuck = Stuck(at=1)
    before = workers()
    pipe = cut(stuck)
    threads = workers() - before
    try:
        with pytest.raises(TimeoutError, match=f"for {SECONDS} s, the pipeline's timeout") as caught:
            pipe.step(X, target=Y)
        _, first, second = str(caught.value).splitlines()
        assert first.startswith("  virtual:0 waits for a message of stage 1 on virtual:1 (action 0B1), for ")
        assert second.startswith(
            "  virtual:1 is in layer '2' (Stuck), stage 1, micro-batch 1 (action 1F1), for "
        )
        (stack,) = caught.value.__notes__
        assert stack.startswith("pipepart: the stack of virtual:1:")
        assert "in wait" in stack
        closed = "the pipeline is closed: a layer on virtual:1 did not return when a step was given up"
        for use in (lambda: pipe.step(X, target=Y), lambda: pipe(X)):
            with pytest.raises(RuntimeError, match=closed):
                use()
        pipe.close()
        assert any(thread.is_alive() for thread in threads)  # it does not wait for the layer
        assert "closed" in repr(pipe)
    finally:
        stuck.released.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_backward_of_a_copy_that_does_not_return():
    """Another device waits for the sum of its gradients."""
    released = threading.Event()

    class Apart(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return calls_in_backward(x, self.wait)

        def wait(self) -> None:
            if threading.current_thread().name.endswith("virtual:3"):
                assert released.wait(60)

    plan = plan_by_hand(["0", "1", "2"], [1], replicas=2, micro_batches=4)
    model = nn.Sequential(nn.Linear(4, 4), Apart(), nn.Linear(4, 4))
    pipe = Pipeline(model, plan, nn.MSELoss(), timeout=SECONDS)
    try:
        with pytest.raises(TimeoutError) as caught:
            pipe.step(X, target=Y)
    finally:
        released.set()
    place = "layer '1' (Apart), stage 1 of copy 1, micro-batch 1 (action 3B1)"
    assert f"virtual:3 is in {place}" in str(caught.value)
    waits = "a message of stage 1 of copy 1 on virtual:3 (action 1REDUCE_GRAD)"
    assert f"virtual:1 waits for {waits}" in str(caught.value)


def test_a_layer_that_returns_late_leaves_a_pipeline_that_works(monkeypatch: pytest.MonkeyPatch):
    """It returns when the timeout's error is made: nothing is closed."""
    stuck = Stuck(at=1)
    monkeypatch.setattr(StepTimeoutError, "add_note", lambda error, note: stuck.released.set())
    with cut(stuck) as pipe:
        with pytest.raises(TimeoutError):
            pipe.step(X, target=Y)
        model = pipe.module
        reference = plain.twin(
            nn.Sequential(*(nn.Identity() if layer is stuck else layer for layer in model.children()))
        )
        reference.zero_grad()
        pipe.zero_grad()
        pipe.step(X, target=Y)
        plain.micro_batched_step(reference, X, Y, nn.MSELoss(), 4)
        plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.slow
@pytest.mark.alone
def test_a_slow_step_that_goes_on_is_not_given_up():
    """Each action takes less than the timeout, all together more."""
    slow = Calls(lambda x: (threading.Event().wait(0.5), x * 1)[1])
    with cut(slow, timeout=1.9) as pipe:
        assert bool(pipe.step(X, target=Y).isfinite())
