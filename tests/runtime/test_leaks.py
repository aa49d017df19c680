"""A thousand steps, with failures and shapes that change, leave as many threads, objects and bytes as before."""

import gc
import threading
import tracemalloc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support.chains import cut_by_hand

STEPS = 1000
WARM_STEPS = 300
FAILS_EVERY = 50


class Fails(nn.Module):
    """Passes its input on, and fails in the forward, or the backward, of what is marked."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.detach() > 1e3).any()):
            raise ValueError("on purpose")
        y = x * 1
        if y.requires_grad:
            y.register_hook(_refuse)
        return y


def _refuse(gradient: Tensor) -> None:
    if bool((gradient.abs() > 1e3).any()):
        raise torch.OutOfMemoryError("on purpose")


def train(pipe: Pipeline, number: int, with_loss: bool) -> None:
    """One step of a size that changes, some of which fail: in the forward or in the backward."""
    samples = 2 + number % 7
    x, y = torch.full((samples, 4), 0.1), torch.zeros(samples, 4)
    if number % FAILS_EVERY == 0:
        x[-1] = 1e9
    elif number % FAILS_EVERY == 25:
        y[-1] = 1e12
    pipe.zero_grad()
    try:
        if with_loss:
            pipe.step(x, target=y)
        else:
            (pipe(x) - y).square().mean().backward()
    except (ValueError, torch.OutOfMemoryError):
        return
    assert number % 25 != 0


def tensors() -> int:
    return sum(1 for one in gc.get_objects() if isinstance(one, Tensor))


def measure() -> dict[str, int]:
    gc.collect()
    return {
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "tensors": tensors(),
        "traced bytes": tracemalloc.get_traced_memory()[0],
    }


WAYS: dict[str, Callable[[nn.Module], Pipeline]] = {
    "zb-h1": lambda model: cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), schedule="zb-h1"),
    "interleaved, twice": lambda model: cut_by_hand(
        model,
        [1, 2, 3],
        loss_fn=nn.MSELoss(),
        schedule="interleaved-1f1b",
        chunks=2,
        micro_batches=4,
        recompute="always",
    ),
    "in the place of the model": lambda model: cut_by_hand(model, [1, 2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_steps(way):
    model = nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 4), nn.Tanh())
    with WAYS[way](model) as pipe:
        for number in range(1, WARM_STEPS):
            train(pipe, number, way != "in the place of the model")
        tracemalloc.start()
        try:
            before = measure()
            for number in range(WARM_STEPS, STEPS):
                train(pipe, number, way != "in the place of the model")
            after = measure()
        finally:
            tracemalloc.stop()
    assert after["threads"] == before["threads"]
    assert after["tensors"] <= before["tensors"] + 5
    assert after["objects"] <= before["objects"] + 200
    assert after["traced bytes"] <= before["traced bytes"] + 200_000
