"""Copies of the model are, at every step, what the user has made of the model."""

import torch
from torch import nn

from tests.support import plain
from tests.support.replicas import IN_TURN, batch, cut_in_two, model_for, summed_step


def test_copies_follow_the_optimizer_of_the_user():
    model = model_for(1)
    reference = plain.twin(model)
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, reference))
    with cut_in_two(model) as pipe:
        for _ in range(4):
            x, y = batch()
            ours.zero_grad()
            theirs.zero_grad()
            pipe.step(x, target=y)
            summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
            ours.step()
            theirs.step()
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_copies_follow_a_write_that_leaves_no_trace():
    model = model_for(1)
    x, y = batch()
    with cut_in_two(model) as pipe:
        pipe.step(x, target=y)
        weight = next(model.parameters())
        version = weight._version
        weight.data.mul_(3)
        assert weight._version == version
        reference = plain.twin(model)
        plain.assert_near(pipe(x).detach(), reference(x).detach())
        plain.assert_near(pipe.step(x, target=y), summed_step(reference, x, y, nn.MSELoss(), IN_TURN))


def test_copies_follow_which_parameters_are_trained():
    model = model_for(1)
    x, y = batch()
    with cut_in_two(model) as pipe:
        model[0].weight.requires_grad_(False)
        pipe.step(x, target=y)
        assert model[0].weight.grad is None
        model[0].weight.requires_grad_(True)
        model.zero_grad()
        reference = plain.twin(model)
        pipe.step(x, target=y)
        summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_copies_follow_the_mode_and_the_rate_of_a_dropout():
    dropout, last = nn.Dropout(0.5), nn.Linear(4, 4)
    model = plain.in_double([nn.Linear(3, 4), dropout, last])
    x, y = batch()
    with cut_in_two(model) as pipe:
        pipe.eval()
        plain.assert_near(pipe.step(x, target=y), nn.MSELoss()(model(x), y).detach())
        pipe.train()
        dropout.p = 0.0
        plain.assert_near(pipe.step(x, target=y), nn.MSELoss()(model(x), y).detach())
        dropout.p = 1.0
        plain.assert_near(pipe.step(x, target=y), (last.bias - y).square().mean().detach())


def test_copies_follow_the_dtype_of_the_model():
    model = model_for(1)
    x, y = (tensor.float() for tensor in batch())
    with cut_in_two(model) as pipe:
        model.float()
        reference = plain.twin(model)
        loss = pipe.step(x, target=y)
        assert loss.dtype == torch.float
        summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_copies_follow_buffers():
    class Scaled(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    scaled = Scaled()
    model = plain.in_double([nn.Linear(3, 4), scaled, nn.Linear(4, 4)])
    x, _ = batch()
    with cut_in_two(model) as pipe:
        scaled.scale.fill_(2)
        plain.assert_near(pipe(x).detach(), model(x).detach())
        scaled.scale = torch.full((1,), 5.0, dtype=torch.double)  # another tensor, of another shape
        plain.assert_near(pipe(x).detach(), model(x).detach())


def test_copies_follow_a_tensor_that_is_no_buffer():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(4, dtype=torch.double)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    scaled = Scaled()
    model = plain.in_double([nn.Linear(3, 4), scaled, nn.Linear(4, 4)])
    x, _ = batch()
    with cut_in_two(model) as pipe:
        scaled.scale = scaled.scale * 2
        plain.assert_near(pipe(x).detach(), model(x).detach())
        scaled.scale.mul_(2)
        plain.assert_near(pipe(x).detach(), model(x).detach())
