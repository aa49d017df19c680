"""Optimizers, clipping, scaling and accumulation around steps: afterwards the parameters of plain training."""

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.support import plain
from tests.support.chains import cut_by_hand

LOSS = nn.CrossEntropyLoss()
X, Y = torch.linspace(-2, 2, 42).reshape(7, 6), torch.arange(7) % 3


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


@pytest.mark.parametrize(("norm_type", "foreach"), [(1.0, None), (3.5, True), (float("inf"), False)])
def test_the_norm_is_that_of_the_plain_model(norm_type: float, foreach: bool | None) -> None:
    model = network()
    reference = plain.twin(model)
    with cut_by_hand(model, [1, 3], loss_fn=LOSS) as pipe:
        pipe.step(X, target=Y)
        norm = pipe.clip_grad_norm_(0.1, norm_type, foreach=foreach)
    plain.micro_batched_step(reference, X, Y, LOSS, 3)
    assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type, foreach=foreach))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_clipping_by_value_without_gradients_and_by_a_norm_that_is_not_finite() -> None:
    model = network()
    reference = plain.twin(model)
    with cut_by_hand(model, [1, 3], loss_fn=LOSS) as pipe:
        assert pipe.clip_grad_norm_(1.0) == 0
        pipe.step(X, target=Y)
        pipe.clip_grad_value_(0.01)
        plain.micro_batched_step(reference, X, Y, LOSS, 3)
        nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        plain.assert_same(plain.gradients(model), plain.gradients(reference))
        pipe.step(X * float("inf"), target=Y)
        with pytest.raises(RuntimeError, match=r"non-finite"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize(("autocast", "schedule"), [(False, "zb-h1"), (True, "1f1b")])
def test_training_with_a_scaler_ends_where_plain_training_ends(autocast: bool, schedule: str) -> None:
    """The scale grows, overflows and backs off; clipping between: parameters and scale bit for bit."""
    model = network().eval()
    reference = plain.twin(model)
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, reference))
    scalers = [GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, schedule=schedule) as pipe:
        for step in range(6):
            x, y = torch.randn(7, 6), torch.randint(3, (7,))
            if step == 3:
                x[3, 3] = float("inf")  # a step that both skip
            pipe.zero_grad()
            theirs.zero_grad()
            with context:
                loss = pipe.step(x, target=y, scaler=scalers[0])
            for xs, ys in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
                with context:
                    part = LOSS(reference(xs), ys) * (len(xs) / len(x))
                scalers[1].scale(part).backward()
            assert step == 3 or float(loss) < 10  # it is not scaled
            for scaler, optimizer, own in zip(scalers, (ours, theirs), (model, reference), strict=True):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(own.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
    plain.assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("reduction", [None, "batch"])
def test_a_weight_and_a_scaler_multiply_gradients_and_leave_the_loss(reduction: str | None) -> None:
    model = network().eval()
    reference = plain.twin(model)
    losses = []
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, schedule="gpipe", reduction=reduction) as pipe:
        for scaler in (None, GradScaler("cpu", enabled=False), GradScaler("cpu", init_scale=4.0)):
            losses.append(pipe.step(X, target=Y, loss_weight=0.25, scaler=scaler))
    expected = LOSS(reference(X), Y)
    (expected * 0.25 * (1 + 1 + 4)).backward()
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach())
    plain.assert_close(plain.gradients(model), plain.gradients(reference), 1e-5)
