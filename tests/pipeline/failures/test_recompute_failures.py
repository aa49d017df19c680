"""A second forward that fails, or cannot be made: what the caller gets, and that the next step works."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import plain
from tests.support.chains import cut_by_hand


class Trouble(Exception):
    pass


@pytest.mark.parametrize("drop_in", [False, True])
def test_an_exception_in_the_second_forward(drop_in):
    """Its own type; notes that name the layer, which forward, the stage and the micro-batch; then a good step."""

    class Fuse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == burning:
                raise Trouble
            return x * 1

    calls, burning = 0, 0
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Fuse(), nn.Linear(4, 4))
    reference = plain.twin(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    burning = 4 + 2  # gpipe: all first forwards, then the second ones
    with cut_by_hand(
        model,
        [1, 3],
        loss_fn=None if drop_in else nn.MSELoss(),
        micro_batches=4,
        schedule="gpipe",
        recompute="always",
    ) as pipe:
        train = (lambda: pipe(x).sum().backward()) if drop_in else (lambda: pipe.step(x, target=y))
        with pytest.raises(Trouble) as caught:
            train()
        first, second = caught.value.__notes__
        assert first == "pipepart: in the second forward of layer '2' (Fuse)"
        assert second.startswith(
            "pipepart: on stage 1 of 3 on virtual:1, micro-batch 1 of 4 (action 1RECOMPUTE1)"
        )
        burning = 0
        pipe.zero_grad()
        train()
    if drop_in:
        reference(x).sum().backward()
    else:
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_close(plain.gradients(model), plain.gradients(reference), 1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_loss(where):
    class Burn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if where == "forward":
                raise Trouble
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise Trouble

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(Burn.apply(output), target)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with (
        cut_by_hand(model, [1], loss_fn=loss_fn, recompute="always", reduction="mean") as pipe,
        pytest.raises(Trouble) as caught,
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert caught.value.__notes__[0] == f"pipepart: in the {where} of the loss"
    assert "stage 1 of 2 on virtual:1, micro-batch 0 of 3" in caught.value.__notes__[1]


def test_layers_that_do_something_else_the_second_time_are_refused():
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            self.calls += 1
            return (x * 1, x * 2) if self.calls > 3 else (x * 1, x.detach())

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, ...]) -> Tensor:
            return pair[0]

    model = nn.Sequential(nn.Linear(4, 4), Fickle(), First())
    with (
        cut_by_hand(model, [2], loss_fn=nn.MSELoss(), schedule="gpipe", recompute="always") as pipe,
        pytest.raises(RuntimeError, match=r"second forward made 2 tensors .* the first 1") as caught,
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert "stage 0 of 2" in caught.value.__notes__[-1]
