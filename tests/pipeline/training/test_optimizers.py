"""Optimizers, schedulers, clipping and accumulation: after some steps the parameters of plain training."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]
LOSS = nn.CrossEntropyLoss()


def one(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: [kind(model.parameters(), **options)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Train the matrices with Muon and the rest with AdamW."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


OPTIMIZERS: dict[str, Make] = {
    "Adadelta": one(torch.optim.Adadelta, lr=0.5),
    "Adafactor": one(torch.optim.Adafactor, lr=0.01),
    "Adagrad": one(torch.optim.Adagrad, lr=0.05),
    "Adam": one(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "AdamW": one(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Adamax": one(torch.optim.Adamax, lr=0.01),
    "ASGD": one(torch.optim.ASGD, lr=0.05),
    "NAdam": one(torch.optim.NAdam, lr=0.01),
    "RAdam": one(torch.optim.RAdam, lr=0.01),
    "RMSprop": one(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": one(torch.optim.Rprop, lr=0.01),
    "SGD": one(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW fused": one(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD foreach": one(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "Adam for loop": one(torch.optim.Adam, lr=0.01, foreach=False, fused=False),
    "Muon": muon,
}


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8 + step % 3, 6), torch.randint(3, (8 + step % 3,))) for step in range(count)]


def check(
    make: Make,
    schedule: str = "1f1b",
    every: int = 1,
    follow: Callable[[torch.optim.Optimizer], Callable[[Tensor], Any]] | None = None,
    set_to_none: bool = True,
) -> nn.Module:
    """Train with clipping, both ways; ``follow`` makes what is called with the loss after each update."""
    model = network()
    reference = plain.twin(model)
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, micro_batches=4, schedule=schedule) as pipe:
        ours, theirs = make(model), make(reference)
        both = [*ours, *theirs]
        followers = [follow(optimizer) for optimizer in both] if follow else []
        for step, (x, y) in enumerate(batches(3 * every), 1):
            loss = pipe.step(x, target=y)
            expected = plain.micro_batched_step(reference, x, y, LOSS, 4)
            plain.assert_near(loss, expected, 1e-6)
            if step % every:
                continue
            norm = pipe.clip_grad_norm_(0.5)
            assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
            for optimizer in both:
                optimizer.step()
            for follower, value in zip(
                followers, [loss] * len(ours) + [expected] * len(theirs), strict=False
            ):
                follower(value)
            pipe.zero_grad(set_to_none)
            for optimizer in theirs:
                optimizer.zero_grad(set_to_none)
    plain.assert_same(model.state_dict(), reference.state_dict())
    rates = [[group["lr"] for one in some for group in one.param_groups] for some in (ours, theirs)]
    assert rates[0] == rates[1]
    return model


@pytest.mark.parametrize(("name", "schedule"), zip(OPTIMIZERS, itertools.cycle(["1f1b", "zb-h1"])))
def test_parameters_are_those_of_plain_training(name, schedule):
    check(OPTIMIZERS[name], schedule)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_several_steps_make_one_update(set_to_none):
    model = check(one(torch.optim.Adam, lr=0.01), "zb-h1", every=2, set_to_none=set_to_none)
    assert all(
        (p.grad is None) == set_to_none and (p.grad is None or not p.grad.any()) for p in model.parameters()
    )


def two_groups(model: nn.Module) -> list[torch.optim.Optimizer]:
    early, late = list(model.parameters())[:4], list(model.parameters())[4:]
    return [torch.optim.SGD([{"params": early, "lr": 0.01}, {"params": late}], lr=0.1, momentum=0.9)]


@pytest.mark.parametrize("name", ["one cycle", "plateau"])
def test_schedules_of_the_learning_rate(name):
    """The plateau is told the loss that a step returns; each group has a rate of its own."""

    def follow(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        if name == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return lambda loss: plateau.step(float(loss))
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        return lambda _: cycle.step()

    check(two_groups, follow=follow)


def test_an_average_of_the_weights_follows():
    model = network()
    reference = plain.twin(model)
    averages = [torch.optim.swa_utils.AveragedModel(each) for each in (model, reference)]
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, micro_batches=4) as pipe:
        for x, y in batches(3):
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, LOSS, 4)
            ours.step()
            theirs.step()
            for average, each in zip(averages, (model, reference), strict=True):
                average.update_parameters(each)
    plain.assert_same(averages[0].state_dict(), averages[1].state_dict())


def test_lbfgs_calls_a_step_as_its_closure():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    reference = plain.twin(model)
    ((x, y),) = batches(1)
    x = x.double()
    theirs = torch.optim.LBFGS(reference.parameters(), lr=0.5, max_iter=5)
    with cut_by_hand(model, [1], loss_fn=LOSS) as pipe:
        ours = torch.optim.LBFGS(pipe.parameters(), lr=0.5, max_iter=5)

        def closure() -> float:
            pipe.zero_grad()
            return float(pipe.step(x, target=y))

        def their_closure() -> float:
            reference.zero_grad()
            return float(plain.micro_batched_step(reference, x, y, LOSS, 3))

        for _ in range(2):
            ours.step(closure)
            theirs.step(their_closure)
    plain.assert_close(model.state_dict(), reference.state_dict(), 1e-9)


X, Y = torch.linspace(-2, 2, 42).reshape(7, 6), torch.arange(7) % 3


@pytest.mark.parametrize("norm_type", [1.0, 3.5, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_the_norm_is_that_of_the_plain_model(norm_type, foreach):
    model = network()
    reference = plain.twin(model)
    with cut_by_hand(model, [1, 3], loss_fn=LOSS) as pipe:
        pipe.step(X, target=Y)
        norm = pipe.clip_grad_norm_(0.1, norm_type, foreach=foreach)
    plain.micro_batched_step(reference, X, Y, LOSS, 3)
    assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type, foreach=foreach))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_other_ways_to_clip():
    """By value; without gradients; and a norm that is not finite, which is an error where that is asked for."""
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
        assert not pipe.clip_grad_norm_(1.0).isfinite()
        with pytest.raises(RuntimeError, match=r"non-finite"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
