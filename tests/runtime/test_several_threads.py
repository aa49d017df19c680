"""Steps, closing and the collector from whatever thread, at whatever time: refused, waited for, never hanging."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls

X, Y = torch.linspace(-1, 1, 24).view(6, 4), torch.zeros(6, 4)

pytestmark = pytest.mark.usefixtures("collected")


def calling(where: str, call: Callable[[], object]) -> nn.Module:
    """A layer that calls something in its forward, or in a hook of a tensor in the backward."""

    def forward(x: Tensor) -> Tensor:
        y = x * 1
        if where == "forward":
            call()
        elif y.requires_grad:
            y.register_hook(lambda gradient: call() and None)
        return y

    return Calls(forward)


def cut(layer: nn.Module, **how: Any) -> Pipeline:
    return cut_by_hand(
        nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)), [2], loss_fn=nn.MSELoss(), **how
    )


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pipepart-")]


@pytest.mark.parametrize("where", ["forward", "hook"])
def test_a_step_within_a_step(where):
    holder: list[Pipeline] = []
    with cut(calling(where, lambda: holder[0].step(X, target=Y))) as pipe:
        holder.append(pipe)
        # A hook runs where gradients are disabled, which is found first.
        reason = "busy" if where == "forward" else "gradients are disabled"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=reason):
                pipe.step(X, target=Y)
        holder.clear()


def test_the_stages_are_for_one_thread_at_a_time():
    """Also for one that was told that they are free just before another took them."""
    with cut(nn.Identity()) as pipe, ThreadPoolExecutor(1) as pool:
        engine: Any = pipe._engine
        error = engine.exclusively(lambda: pool.submit(engine.exclusively, int).exception(60))
        engine.exclusively(int)
    assert "busy" in str(error)


def test_of_many_threads_one_steps_at_a_time():
    """Each tries until it has had its steps; whoever comes in between is told so and nothing else."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = plain.twin(model)
    errors: list[str] = []

    def train() -> None:
        left = 5
        while left:
            try:
                pipe.step(X, target=Y)
                left -= 1
            except RuntimeError as error:
                errors.append(str(error))

    with cut_by_hand(model, [2], loss_fn=nn.MSELoss()) as pipe:
        threads = [threading.Thread(target=train) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any("busy" not in error for error in errors)
    for _ in range(20):
        plain.micro_batched_step(reference, X, Y, nn.MSELoss(), 3)
    plain.assert_close(plain.gradients(model), plain.gradients(reference), 1e-5)


def test_closing_while_another_thread_is_in_a_step_waits_for_it():
    inside, leave = threading.Event(), threading.Event()
    losses: list[Tensor] = []

    def wait() -> None:
        inside.set()
        assert leave.wait(60)

    pipe = cut(calling("forward", wait))
    stepping = threading.Thread(target=lambda: losses.append(pipe.step(X, target=Y)))
    stepping.start()
    assert inside.wait(60)
    closing = threading.Thread(target=pipe.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        pipe.step(X, target=Y)
    leave.set()
    stepping.join(60)
    closing.join(60)
    assert not closing.is_alive()
    assert len(losses) == 1
    assert workers() == []


@pytest.mark.parametrize("where", ["forward", "hook"])
def test_a_layer_that_closes_its_own_pipeline(where):
    """The step goes on to its end, and is the last."""
    holder: list[Pipeline] = []
    pipe = cut(calling(where, lambda: holder[0].close()))
    holder.append(pipe)
    threads = workers()
    assert bool(pipe.step(X, target=Y).isfinite())
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        pipe.step(X, target=Y)
    for thread in threads:
        thread.join(60)
    assert workers() == []
