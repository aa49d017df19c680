"""Shared parameters whose stages are on devices apart: each later stage works on a copy, kept equal."""

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.tied import Rotated, cut_apart, language_model, loss_fn, new_values, words


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_training_ends_where_plain_training_ends(schedule, recompute):
    model = language_model()
    reference = plain.twin(model)
    weight = model.get_parameter("0.weight")
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, reference))
    with cut_apart(model, [1, 3, 5], schedule=schedule, recompute=recompute) as pipe:
        for _ in range(5):
            x, y = words()
            pipe.zero_grad()
            reference.zero_grad()
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, loss_fn, 3)
            ours.step()
            theirs.step()
    plain.assert_same(model.state_dict(), reference.state_dict())
    assert model.get_parameter("5.weight") is model.get_parameter("2.weight") is weight


def test_two_outputs_wait_for_one_backward():
    model = language_model().double()
    reference = plain.twin(model)
    x, y = words()
    with cut_apart(model, [1, 3, 5]) as pipe:
        first, second = pipe(x), pipe(x[:4])
        (loss_fn(first, y) + second.pow(2).mean()).backward()
    (loss_fn(reference(x), y) + reference(x[:4]).pow(2).mean()).backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_another_forward_after_a_write_is_found_by_the_backward_of_the_first():
    """The copy that the first has saved is written: torch refuses that, as it does without stages."""
    model = language_model()
    x, y = words()
    with cut_apart(model, [1, 3, 5]) as pipe:
        loss = loss_fn(pipe(x), y)
        new_values(model)
        pipe(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_one_layer_in_several_stages():
    twice = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), twice, nn.Tanh(), twice, nn.Linear(4, 4), twice)
    reference = plain.twin(model)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    with cut_apart(model, [1, 2, 4], nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_buffer_of_one_layer_in_several_stages():
    """Its values are followed, too."""
    rotated = Rotated(torch.randn(4))
    model = nn.Sequential(rotated, nn.Tanh(), rotated)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    with cut_apart(model, [1, 2], nn.MSELoss()) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            reference = plain.twin(model)
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
            plain.assert_same(plain.gradients(model), plain.gradients(reference))
            rotated.get_buffer("table").mul_(3)


def test_a_shared_buffer_that_is_written_is_refused():
    class Counting(Rotated):
        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("table").add_(1)
            return super().forward(x)

    counting = Counting(torch.zeros(4))
    model = nn.Sequential(counting, nn.Tanh(), counting)
    with (
        cut_apart(model, [2], nn.MSELoss()) as pipe,
        pytest.raises(RuntimeError, match=r"buffer [02]\.table is shared by layers of stages 0, 1"),
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_the_norm_of_gradients_is_that_of_the_plain_model():
    model = language_model()
    reference = plain.twin(model)
    x, y = words()
    with cut_apart(model, [1, 3, 5]) as pipe:
        pipe.step(x, target=y)
        norm = pipe.clip_grad_norm_(0.1)
    plain.micro_batched_step(reference, x, y, loss_fn, 3)
    assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
