"""In-place writes that autograd cannot follow across the border of two stages are refused, and others are exact."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.conformance.layers import double
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls

OVERWRITTEN = r"overwritten after the stage before it had sent it.*clone\(\)"
STRICT = pytest.mark.parametrize("strict", [False, True])


def viewed(copied: bool = False) -> Calls:
    """Returns its input times one, and a view of that, or a copy of the view."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1
        return y, y[:, :2].clone() if copied else y[:, :2]

    return Calls(function)


def writes(which: int | None) -> Calls:
    """Writes into one of its inputs, unless told not to."""

    def function(given: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
        if which is not None:
            given[which].mul_(weight)
        return given[0] + given[1].sum(1, keepdim=True)

    return Calls(function, weight=torch.full((1,), 3.0))


def step(model: nn.Module, borders: list[int], **how: Any) -> None:
    """A step has the gradients of the plain model."""
    parts = how.setdefault("micro_batches", 3)
    with cut_by_hand(model, borders, loss_fn=nn.MSELoss(), **how) as pipe:
        x, y = torch.randn(2, 2 * parts, 4)
        plain.check_step(pipe, x, y, nn.MSELoss(), parts)


@STRICT
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_write_behind_a_border_into_a_tensor_and_its_view(which, recompute, strict):
    model = nn.Sequential(nn.Linear(4, 4), viewed(), writes(which), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"layer '2' \(Calls\).*shares memory with another one") as caught:
        step(model, [2], strict=strict, recompute=recompute)
    assert "stage 1 of 2" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("copied", "which", "border"),
    [(False, 0, 1), (False, 0, 3), (False, None, 2), (True, 0, 2)],
    ids=["in a stage", "in another one", "nothing is written", "a copy of the view"],
)
def test_writes_that_change_no_tensor_of_another_stage(copied, which, border):
    step(nn.Sequential(nn.Linear(4, 4), viewed(copied), writes(which), nn.Linear(4, 4)), [border])


@STRICT
def test_a_message_that_the_next_micro_batch_overwrites(strict):
    """Micro-batch 1 is received when micro-batch 2 has passed the stage before."""
    third_was_made = threading.Lock()  # which layers may share, as it holds no Python values
    third_was_made.acquire()
    kept, calls = torch.zeros(2, 4), iter(range(3))

    def keep(x: Tensor) -> Tensor:
        kept.copy_(x.detach())
        if next(calls) == 2:
            third_was_made.release()
        return kept

    def wait(x: Tensor) -> Tensor:
        assert third_was_made.acquire(timeout=60)
        third_was_made.release()
        return x

    model = nn.Sequential(Calls(keep), Calls(wait), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        step(model, [1], strict=strict, schedule="gpipe")


def test_a_message_that_is_overwritten_before_the_second_forward_that_needs_it():
    """Micro-batch 1 is made when the first forward of stage 1 has passed micro-batch 0 on."""
    was_passed_on = threading.Lock()
    was_passed_on.acquire()
    kept, calls = torch.zeros(2, 4), iter(range(2))

    def keep(x: Tensor) -> Tensor:
        assert next(calls) == 0 or was_passed_on.acquire(timeout=60)
        kept.copy_(x.detach())
        return kept

    def arrive(x: Tensor) -> Tensor:
        if was_passed_on.locked():
            was_passed_on.release()
        return x * 1

    model = nn.Sequential(Calls(keep), nn.Linear(4, 4), Calls(arrive), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        step(model, [1, 2], schedule="gpipe", recompute="always", micro_batches=2)


def test_a_layer_may_write_into_its_micro_batch_while_others_wait_for_their_backward():
    """The micro-batches are views of one tensor, and do not share the counter of its writes."""
    model = nn.Sequential(double(), nn.Linear(4, 4), nn.Linear(4, 4))
    x, y = torch.randn(2, 8, 4)
    reference = plain.twin(model)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=4, schedule="gpipe") as pipe:
        pipe.step(x.clone(), target=y)
    plain.micro_batched_step(reference, x.clone(), y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
