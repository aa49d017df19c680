"""Layers that stages share: what their forwards set is the user's, and what cannot be shared is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.tied import Head, Rotated, cut_apart, loss_fn, words


def test_settings_of_a_layer_in_several_stages_are_followed():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop, self.scale = nn.Linear(4, 4), nn.Dropout(0.5), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.inner(x)) * self.scale

    shared = Scaled()
    model = nn.Sequential(nn.Linear(4, 4), shared, shared)
    x = torch.randn(7, 4)
    with cut_by_hand(model, [2]) as pipe, torch.no_grad():
        pipe(x)
        shared.scale = 3.0
        pipe.eval()
        plain.assert_near(pipe(x), model(x), 1e-6)


def test_what_a_layer_sets_on_itself_is_set_on_the_users():
    class Remembering(Head):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    embedding = nn.Embedding(9, 4)
    model = nn.Sequential(embedding, nn.Linear(4, 4), Remembering(embedding.weight))
    x, _ = words()
    with cut_by_hand(model, [2], micro_batches=1) as pipe, torch.no_grad():
        output = pipe(x)
    last = model.get_submodule("2").last
    assert isinstance(last, Tensor)
    assert last.equal(output)


def test_a_list_of_weights_holds_the_replicas():
    """A hook on the user's weight sees one gradient a micro-batch, the whole one."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.weights = [self.weight]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weights[0]

    model = nn.Sequential(nn.Linear(4, 4), Listed(), nn.Tanh())
    model.append(model[1])
    seen: list[Tensor] = []
    model.get_parameter("1.weight").register_hook(seen.append)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    ours, gradients = seen[:], plain.gradients(model)
    seen.clear()
    model.zero_grad()
    plain.micro_batched_step(model, x, y, nn.MSELoss(), 3)
    assert len(ours) == len(seen) == 3
    assert all(map(torch.equal, ours, seen))
    plain.assert_same(gradients, plain.gradients(model))


def test_a_hook_that_is_a_method_of_the_layer_sets_what_its_forward_reads():
    class Hooked(Head):
        scale = 1.0

        def __init__(self, weight: Any) -> None:
            super().__init__(weight)
            self.register_forward_pre_hook(self.measure)

        def measure(self, module: nn.Module, args: tuple[Tensor]) -> None:
            self.scale = float(args[0].detach().mean())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    embedding = nn.Embedding(9, 4)
    model = nn.Sequential(embedding, nn.Linear(4, 4), Hooked(embedding.weight))
    x, y = words()
    reference = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    reference.append(Hooked(reference[0].weight))
    reference.load_state_dict(model.state_dict())
    with cut_by_hand(model, [2], loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, loss_fn, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_part_that_was_replaced_in_a_layer_that_stages_share_is_refused():
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    holds = Holds()
    model = nn.Sequential(nn.Linear(4, 4), holds, nn.Tanh(), holds)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss()) as pipe:
        holds.inner = nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r"layer '3' \(Holds\) has other modules"):
            pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_a_step_that_failed_leaves_no_gradient_behind():
    class Failing(nn.Module):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                x.register_hook(lambda _: 1 / 0)
            return x * 1

    failing = Failing()
    embedding = nn.Embedding(9, 4)
    model = nn.Sequential(embedding, failing, nn.Linear(4, 4), Head(embedding.weight))
    x, y = words()
    reference = plain.twin(model)
    with cut_by_hand(model, [1, 2, 3], loss_fn=loss_fn) as pipe:
        failing.broken = True
        with pytest.raises(ZeroDivisionError):
            pipe.step(x, target=y)
        failing.broken = False
        pipe.zero_grad()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, loss_fn, 3)
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


@pytest.mark.parametrize("cut", [cut_by_hand, cut_apart], ids=["on one device", "on devices apart"])
def test_a_shared_buffer_that_is_written_is_refused_by_name(cut):
    class Counting(Rotated):
        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("table").add_(1)
            return super().forward(x)

    counting = Counting(torch.zeros(4))
    model = nn.Sequential(counting, nn.Tanh(), counting)
    with (
        cut(model, [2], loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(
            RuntimeError, match=r"buffer [02]\.table is shared by layers of stages 0, 1, which write it"
        ),
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_running_statistics_shared_by_stages_are_refused_by_name():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    with pytest.raises(ValueError, match=r"buffer 1\.running_mean is shared by layers of stages 0, 1"):
        cut_by_hand(model, [2], loss_fn=nn.MSELoss())
