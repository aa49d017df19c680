"""A gradient scaler around a step: gradients scaled as ``scaler.scale(loss).backward()`` scales them."""

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from tests.support import plain
from tests.support.chains import cut_by_hand


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def scaled_step(model: nn.Module, x: Tensor, y: Tensor, parts: int, scaler: GradScaler) -> None:
    for xs, ys in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        loss = nn.functional.cross_entropy(model(xs), ys) * (len(xs) / len(x))
        scaler.scale(loss).backward()


@pytest.mark.parametrize(("autocast", "schedule"), [(False, "zb-h1"), (True, "1f1b")])
def test_training_with_a_scaler_ends_where_plain_training_ends(autocast, schedule):
    """The scale grows, overflows and backs off; clipping between: parameters and scale bit for bit."""
    model = network()
    reference = plain.twin(model)
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, reference))
    scalers = [GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    with cut_by_hand(model, [2, 4], loss_fn=nn.CrossEntropyLoss(), schedule=schedule) as pipe:
        for step in range(6):
            x, y = torch.randn(7, 6), torch.randint(3, (7,))
            if step == 3:
                x[3, 3] = float("inf")  # a step that both skip
            pipe.zero_grad()
            theirs.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = pipe.step(x, target=y, scaler=scalers[0])
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                scaled_step(reference, x, y, 3, scalers[1])
            if step != 3:
                assert float(loss) < 10
            for scaler, optimizer, own in zip(scalers, (ours, theirs), (model, reference), strict=True):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(own.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_the_loss_that_is_returned_is_not_scaled_and_a_scaler_that_is_off_changes_nothing():
    model = network()
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    with cut_by_hand(model, [2], loss_fn=nn.CrossEntropyLoss()) as pipe:
        loss = pipe.step(x, target=y)
        plain_gradients = plain.gradients(model)
        pipe.zero_grad()
        assert pipe.step(x, target=y, scaler=GradScaler("cpu", enabled=False)).equal(loss)
        plain.assert_same(plain.gradients(model), plain_gradients)
        pipe.zero_grad()
        assert pipe.step(x, target=y, scaler=GradScaler("cpu", init_scale=4.0)).equal(loss)
    scaled = {name: None if g is None else g / 4 for name, g in plain.gradients(model).items()}
    plain.assert_same(scaled, plain_gradients)


@pytest.mark.parametrize("reduction", [None, "batch"])
def test_a_weight_multiplies_gradients_and_leaves_the_loss(reduction):
    model = network()
    reference = plain.twin(model)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    loss_fn = nn.CrossEntropyLoss()
    with cut_by_hand(model, [2, 4], loss_fn=loss_fn, schedule="gpipe", reduction=reduction) as pipe:
        losses = [
            pipe.step(xs, target=ys, loss_weight=0.25) for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True)
        ]
    for loss, xs, ys in zip(losses, x.chunk(2), y.chunk(2), strict=True):
        expected = loss_fn(reference(xs), ys)
        (expected * 0.25).backward()
        torch.testing.assert_close(loss, expected.detach())
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
