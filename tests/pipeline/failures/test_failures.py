"""An exception anywhere in a step reaches the caller as it was raised, and the next step works."""

import re
import threading
import traceback
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.runtime.state.replicas import Replica
from pipepart.runtime.step import Step
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.in_backward import calls_in_backward
from tests.support.two_parts import Calls, splits

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(1, -1, 32).view(8, 4)
LOSS = nn.MSELoss()


class Trouble(Exception):
    """An exception that cannot be constructed from its message alone."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"trouble {code}")
        self.code, self.reason = code, reason


class Fuse(nn.Module):
    """A layer that returns its input, and raises in the forward or backward of call ``at`` if it is armed.

    ``where`` is ``"forward"`` or ``"backward"``.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.at: int | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        call, self.calls = self.calls, self.calls + 1
        if self.where == "forward":
            self.burn(call)
            return x * 1
        return calls_in_backward(x, partial(self.burn, call))

    def burn(self, call: int) -> None:
        if call == self.at:
            raise Trouble(call, reason=self.where)


def fail(error: BaseException, *_: Any) -> Any:
    raise error


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def around(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))


def cut(model: nn.Module, borders: list[int], **options: Any) -> Pipeline:
    options = {"loss_fn": LOSS, "micro_batches": 4, **options}
    return cut_by_hand(model, borders, timeout=60, **options)


@pytest.mark.parametrize(
    ("where", "position", "micro_batch", "schedule"),
    [
        ("forward", 0, 0, "1f1b"),
        ("forward", 5, 3, "zb-h1"),
        ("backward", 2, 3, "gpipe"),
        ("backward", 1, 0, "sequential"),
        ("backward", 4, 0, "zb-h1"),
    ],
)
def test_an_exception_in_a_layer(where, position, micro_batch, schedule):
    """Its own object, the frame that raised it, notes with layer, stage and micro-batch; then a good step."""
    fuse = Fuse(where)
    modules = list(
        around(nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    )  # with the fuse, two layers in each of three stages
    modules.insert(position, fuse)
    # The first layer's backward hook only fires where its input has a gradient.
    x = X.clone().requires_grad_()
    with cut(nn.Sequential(*modules), [2, 4], schedule=schedule) as pipe:
        fuse.at = micro_batch
        with pytest.raises(Trouble) as caught:
            pipe.step(x, target=Y)
        assert (caught.value.code, caught.value.reason) == (micro_batch, where)
        assert "in burn" in "".join(traceback.format_exception(caught.value))
        assert f"stage {position // 2} of 3" in notes(caught.value)
        assert f"micro-batch {micro_batch} of 4" in notes(caught.value)
        assert (f"layer '{position}' (Fuse)" in notes(caught.value)) == (where == "forward")
        part = "F" if where == "forward" else "I" if schedule == "zb-h1" else "B"
        assert f"(action {position // 2}{part}{micro_batch})" in notes(caught.value)
        fuse.at = None
        plain.check_step(pipe, x, Y, LOSS, 4)


@pytest.mark.parametrize(
    ("where", "micro_batch", "recompute"), [("forward", 2, "always"), ("backward", 0, "never")]
)
def test_an_exception_in_the_loss(where, micro_batch, recompute):
    fuse = Fuse(where)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        number = round(float(target.detach().min()))  # each micro-batch's target is its number
        if where == "forward":
            fuse.burn(number)
        return LOSS(calls_in_backward(output, partial(fuse.burn, number)), target)

    y = torch.arange(4.0).repeat_interleave(2)[:, None].repeat(1, 4)
    with cut(around(nn.Tanh()), [1], loss_fn=loss_fn, reduction="mean", recompute=recompute) as pipe:
        fuse.at = micro_batch
        with pytest.raises(Trouble) as caught:
            pipe.step(X, target=y)
        assert caught.value.reason == where
        assert ("in the forward of the loss" in notes(caught.value)) == (where == "forward")
        assert "stage 1 of 2" in notes(caught.value)
        assert f"micro-batch {micro_batch} of 4" in notes(caught.value)
        fuse.at = None
        plain.check_step(pipe, X, y, LOSS, 4)


class Silent(Exception):
    """Takes no notes, and arrives as it is."""

    def add_note(self, note: str) -> None:
        raise TypeError("no notes")


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt, MemoryError, Silent])
def test_exceptions_that_python_treats_apart(kind):
    with cut(around(Calls(partial(fail, kind("from a layer")))), [1, 2]) as pipe:
        for _ in range(3):
            with pytest.raises(kind, match="from a layer") as caught:
                pipe.step(X, target=Y)
            assert kind is Silent or "layer '1' (Calls)" in notes(caught.value)


def test_the_first_of_two_failures_arrives(monkeypatch):
    """The second stage is in its first micro-batch when the first one fails in its second, and fails then."""
    failed, fail_step = threading.Event(), Step.fail

    def noted(step: Step, error: BaseException, worker: int | None = None) -> None:
        fail_step(step, error, worker)
        failed.set()

    def fail_behind(x: Tensor) -> Tensor:
        assert failed.wait(60)
        raise Trouble(1, reason="second")

    monkeypatch.setattr(Step, "fail", noted)
    fuse = Fuse("forward")
    fuse.at = 1
    with (
        cut(around(fuse, Calls(fail_behind)), [2], reduction="mean") as pipe,
        pytest.raises(Trouble) as caught,
    ):
        pipe.step(X, target=Y)
    assert (caught.value.code, caught.value.reason) == (1, "forward")


@pytest.mark.parametrize("drop_in", [False, True])
def test_a_second_forward(drop_in):
    """Buffers are the user's again."""

    def burn(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4 + 2:  # gpipe: all first forwards, then the second ones
            raise Trouble(7, reason="second")
        return x * 1

    calls, norm = 0, nn.BatchNorm1d(4)
    running = norm.running_mean
    with cut(around(norm, Calls(burn)), [1, 3], schedule="gpipe", recompute="always") as pipe:
        with pytest.raises(Trouble) as caught:
            pipe(X).sum().backward() if drop_in else pipe.step(X, target=Y)
        first, second = caught.value.__notes__
        assert first == "pipepart: in the second forward of layer '2' (Calls)"
        place = "on stage 1 of 3 on virtual:1, micro-batch 1 of 4 (action 1RECOMPUTE1)"
        assert second.startswith(f"pipepart: {place}")
        assert norm.running_mean is running
        assert norm.num_batches_tracked == 4
        plain.check_step(pipe, X, Y, LOSS, 4)


def test_a_second_forward_that_does_something_else():
    def fickle(x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return (x * 1, x * 2) if calls > 4 else (x * 1, x.detach())

    calls = 0
    model = nn.Sequential(nn.Linear(4, 4), Calls(fickle), Calls(lambda pair: pair[0]))
    with (
        cut(model, [2], schedule="gpipe", recompute="always") as pipe,
        pytest.raises(RuntimeError, match=r"second forward made 2 tensors .* the first 1") as caught,
    ):
        pipe.step(X, target=Y)
    assert "stage 0 of 2" in caught.value.__notes__[-1]


class Overwrites(nn.Linear):
    """Writes over the input of its last call when it is armed."""

    held: Tensor | None = None
    armed = False

    def forward(self, input: Tensor) -> Tensor:
        if self.armed and self.held is not None:
            self.held.add_(1)
        own = input * 1
        self.held = own.detach()
        return super().forward(own)


@splits
def test_the_backward_for_the_weights():
    """The input of a layer is written into after the first part, which has passed its gradient on already."""
    overwrites = Overwrites(4, 4)
    with cut(around(nn.Tanh(), overwrites), [2], schedule="zb-h1") as pipe:
        overwrites.armed = True
        with pytest.raises(RuntimeError, match="has been written into") as caught:
            pipe.step(X, target=Y)
        (place,) = caught.value.__notes__
        assert "stage 1 of 2" in place
        assert "(action 1W0)" in place
        overwrites.armed, overwrites.held = False, None
        plain.check_step(pipe, X, Y, LOSS, 4)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_step_of_a_stages_optimizer(stage):
    model = around(nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    with cut(model, [2, 4], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)) as pipe:
        raising = partial(fail, Trouble(2, reason="optimizer"))
        handle = pipe.optimizers[stage].register_step_pre_hook(raising)
        with pytest.raises(Trouble) as caught:
            pipe.step(X, target=Y)
        assert "in the step of its optimizer (SGD)" in notes(caught.value)
        place = f"stage {stage} of 3 on virtual:{stage}, all micro-batches (action {stage}OPT_STEP)"
        assert place in notes(caught.value)
        handle.remove()
        plain.check_step(pipe, X, Y, LOSS, 4)


def test_the_sum_of_the_gradients_of_two_copies(monkeypatch):
    with cut(around(nn.Tanh()), [1], replicas=2) as pipe:
        with monkeypatch.context() as patch:
            patch.setattr(Replica, "hand_over", partial(fail, Trouble(3, reason="sum")))
            with pytest.raises(Trouble) as caught:
                pipe.step(X, target=Y)
        assert re.search(r"\(action [23]REDUCE_GRAD\)", notes(caught.value))
        plain.check_step(pipe, X, Y, LOSS, 4, replica_of=(0, 1))
