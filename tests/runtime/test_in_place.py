"""In-place writes that autograd cannot follow across the border of two stages are refused, and others are exact."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand

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


def step(model: nn.Module, borders: list[int], strict: bool, **how: Any) -> None:
    """A step has the gradients of the plain model."""
    with cut_by_hand(model, borders, loss_fn=nn.MSELoss(), strict=strict, **how) as pipe:
        plain.check_step(pipe, torch.randn(6, 4), torch.randn(6, 4), nn.MSELoss())


@STRICT
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_write_behind_a_border_into_a_tensor_and_its_view(which, recompute, strict):
    model = nn.Sequential(nn.Linear(4, 4), Viewed(slice(0, 2)), Writes(which), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"layer '2' \(Writes\).*shares memory with another one") as caught:
        step(model, [2], strict, recompute=recompute)
    assert "stage 1 of 2" in "\n".join(caught.value.__notes__)


@STRICT
@pytest.mark.parametrize("border", [1, 3])
def test_the_same_write_within_a_stage(border, strict):
    step(nn.Sequential(nn.Linear(4, 4), Viewed(slice(0, 2)), Writes(0), nn.Linear(4, 4)), [border], strict)


@STRICT
@pytest.mark.parametrize(
    ("copied", "which"), [(False, None), (True, 0)], ids=["nothing is written", "a copy of the view"]
)
def test_writes_behind_a_border_that_change_no_other_tensor(copied, which, strict):
    step(
        nn.Sequential(nn.Linear(4, 4), Viewed(slice(0, 2), copied), Writes(which), nn.Linear(4, 4)),
        [2],
        strict,
    )


class Kept(nn.Module):
    """Returns memory that it keeps, or a copy of that."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.copied, self.calls = copied, 0
        self.register_buffer("kept", torch.zeros(2, 4))
        self.not_called_three_times = threading.Lock()  # which layers may share, as it holds no Python values
        self.not_called_three_times.acquire()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.get_buffer("kept").copy_(x.detach())
        self.calls += 1
        if self.calls == 3:
            self.not_called_three_times.release()
        return kept.clone() if self.copied else kept


class Waits(nn.Module):
    """Waits until another layer has seen all micro-batches."""

    def __init__(self, other: Kept) -> None:
        super().__init__()
        self.lock = other.not_called_three_times

    def forward(self, x: Tensor) -> Tensor:
        assert self.lock.acquire(timeout=60)
        self.lock.release()
        return x


@STRICT
@pytest.mark.parametrize("copied", [False, True])
def test_a_message_that_the_next_micro_batch_overwrites(copied, strict):
    """Micro-batch 1 is received when micro-batch 2 has passed the stage before."""
    kept = Kept(copied)
    model = nn.Sequential(kept, Waits(kept), nn.Linear(4, 4), nn.Linear(4, 4))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), strict=strict, schedule="gpipe") as pipe:
        if not copied:
            with pytest.raises(
                RuntimeError, match=r"overwritten after the stage before it had sent it.*clone\(\)"
            ):
                pipe.step(x, target=y)
            return
        pipe.step(x, target=y)
    trained = nn.Sequential(model[2], model[3])
    reference = plain.twin(trained)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(trained), plain.gradients(reference))


class WritesItsInput(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mul_(2))


@STRICT
def test_a_layer_may_write_into_its_micro_batch_while_others_wait_for_their_backward(strict):
    """The micro-batches are views of one tensor, and do not share the counter of its writes."""
    torch.manual_seed(0)
    model = nn.Sequential(WritesItsInput(4, 4), nn.Linear(4, 4))
    twin = plain.twin(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    nn.MSELoss()(twin(x.clone()), y).backward()
    how: dict[str, Any] = {"micro_batches": 4, "schedule": "gpipe", "strict": strict}
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), **how) as pipe:
        pipe.step(x.clone(), target=y)
    plain.assert_close(plain.gradients(model), plain.gradients(twin), 1e-6)
