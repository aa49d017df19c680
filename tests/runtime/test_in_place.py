"""In-place writes that autograd cannot follow across the border of two stages are refused, and others are exact."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.conformance.layers import Double
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls

STRICT = pytest.mark.parametrize("strict", [False, True])


class Viewed(nn.Module):
    """Returns its input times one, and a view of that."""

    def __init__(self, view: slice, copied: bool = False) -> None:
        super().__init__()
        self.view, self.copied = view, copied

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1
        return y, y[:, self.view].clone() if self.copied else y[:, self.view]


class Writes(nn.Module):
    """Writes into one of its inputs, unless told not to."""

    def __init__(self, which: int | None) -> None:
        super().__init__()
        self.which = which
        self.weight = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        if self.which is not None:
            given[self.which].mul_(self.weight)
        y, view = given
        return nn.functional.pad(y, (0, 4 - y.shape[1])) + view.sum(1, keepdim=True)


def step(model: nn.Module, borders: list[int], **how: Any) -> None:
    """A step has the gradients of the plain model."""
    with cut_by_hand(model, borders, loss_fn=nn.MSELoss(), **how) as pipe:
        plain.check_step(pipe, torch.randn(6, 4), torch.randn(6, 4), nn.MSELoss())


@STRICT
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_write_behind_a_border_into_a_tensor_and_its_view(which, recompute, strict):
    model = nn.Sequential(nn.Linear(4, 4), Viewed(slice(0, 2)), Writes(which), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"layer '2' \(Writes\).*shares memory with another one") as caught:
        step(model, [2], strict=strict, recompute=recompute)
    assert "stage 1 of 2" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("copied", "which", "border"),
    [(False, 0, 1), (False, 0, 3), (False, None, 2), (True, 0, 2)],
    ids=["in a stage", "in another one", "nothing is written", "a copy of the view"],
)
def test_writes_that_change_no_tensor_of_another_stage(copied, which, border):
    step(
        nn.Sequential(nn.Linear(4, 4), Viewed(slice(0, 2), copied), Writes(which), nn.Linear(4, 4)), [border]
    )


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
    with (
        cut_by_hand(model, [1], loss_fn=nn.MSELoss(), strict=strict, schedule="gpipe") as pipe,
        pytest.raises(RuntimeError, match=r"overwritten after the stage before it had sent it.*clone\(\)"),
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


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
    how: dict[str, Any] = {"schedule": "gpipe", "recompute": "always", "micro_batches": 2}
    with (
        cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), **how) as pipe,
        pytest.raises(RuntimeError, match=r"overwritten after the stage before it had sent it.*clone\(\)"),
    ):
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))


def test_a_layer_may_write_into_its_micro_batch_while_others_wait_for_their_backward():
    """The micro-batches are views of one tensor, and do not share the counter of its writes."""
    model = plain.in_double([Double(), nn.Linear(4, 4), nn.Linear(4, 4)])
    x, y = torch.randn(2, 8, 4).double()
    reference = plain.twin(model)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=4, schedule="gpipe") as pipe:
        pipe.step(x.clone(), target=y)
    plain.micro_batched_step(reference, x.clone(), y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
