"""An exception anywhere in a step reaches the caller as it was raised, and the next step works."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.fuses import Burning, Fuse, Trouble, notes, text_of_traceback
from tests.support.pairwise import pairwise
from tests.support.two_parts import Calls


def chain_with(fuse: nn.Module, position: int) -> nn.Sequential:
    """Three stages of two layers each: [0, 1], [2, 3], [4, 5], the fuse among them."""
    modules: list[nn.Module] = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    modules.insert(position, fuse)
    return nn.Sequential(*modules)


@pytest.mark.parametrize(
    ("where", "position", "micro_batch", "schedule"),
    pairwise(
        ["forward", "function", "tensor hook"],
        [0, 1, 2, 4, 5],
        [0, 3],
        ["1f1b", "gpipe", "sequential", "zb-h1"],
    ),
)
def test_an_exception_in_a_layer(where, position, micro_batch, schedule):
    """Its own object, the frame that raised it, notes with layer, stage and micro-batch; then a good step."""
    fuse = Fuse(where)
    model = chain_with(fuse, position)
    # The first layer's backward hook only fires where its input has a gradient.
    x, y = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)
    reference = plain.twin(model)
    with cut_by_hand(model, [2, 4], loss_fn=nn.MSELoss(), micro_batches=4, schedule=schedule) as pipe:
        fuse.at = micro_batch
        with pytest.raises(Trouble) as caught:
            pipe.step(x, target=y)
        assert (caught.value.code, caught.value.reason) == (micro_batch, where)
        assert "in burn" in text_of_traceback(caught.value)
        assert f"stage {position // 2} of 3" in notes(caught.value)
        assert f"micro-batch {micro_batch} of 4" in notes(caught.value)
        assert (f"layer '{position}' (Fuse)" in notes(caught.value)) == (where == "forward")
        part = "F" if where == "forward" else "I" if schedule == "zb-h1" else "B"
        assert f"(action {position // 2}{part}{micro_batch})" in notes(caught.value)

        fuse.at = None
        pipe.zero_grad()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize(
    ("where", "micro_batch", "recompute"),
    pairwise(["forward", "backward"], [0, 2], ["never", "always"]),
)
def test_an_exception_in_the_loss(where, micro_batch, recompute):
    fuse = Fuse(where)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        number = round(float(target.detach().min()))  # each micro-batch's target is its number
        if where == "forward":
            fuse.burn(number)
        return nn.functional.mse_loss(Burning.apply(output, fuse, number), target)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = plain.twin(model)
    x, y = torch.randn(8, 4), torch.arange(4.0).repeat_interleave(2)[:, None].repeat(1, 4)
    options: dict[str, Any] = {"reduction": "mean", "recompute": recompute}
    with cut_by_hand(model, [1], loss_fn=loss_fn, micro_batches=4, **options) as pipe:
        fuse.at = micro_batch
        with pytest.raises(Trouble) as caught:
            pipe.step(x, target=y)
        assert caught.value.reason == where
        assert ("in the forward of the loss" in notes(caught.value)) == (where == "forward")
        assert "stage 1 of 2" in notes(caught.value)
        assert f"micro-batch {micro_batch} of 4" in notes(caught.value)
        fuse.at = None
        pipe.zero_grad()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize(
    "kind", [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt, MemoryError, OSError]
)
def test_exceptions_that_python_treats_apart(kind):
    def fail(x: Tensor) -> Tensor:
        raise kind("from a layer")

    model = nn.Sequential(nn.Linear(4, 4), Calls(fail), nn.Linear(4, 4))
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss()) as pipe:
        for _ in range(2):
            with pytest.raises(kind, match="from a layer") as caught:
                pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
            assert "layer '1' (Calls)" in notes(caught.value)


def test_an_exception_raised_again_carries_the_notes_of_one_step():
    error = ValueError("made once")

    def fail(x: Tensor) -> Tensor:
        raise error

    with cut_by_hand(nn.Sequential(nn.Linear(4, 4), Calls(fail)), [1], loss_fn=nn.MSELoss()) as pipe:
        lengths = []
        for _ in range(3):
            with pytest.raises(ValueError, match="made once") as caught:
                pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
            lengths.append(len(caught.value.__notes__))
    assert lengths == [lengths[0]] * 3
