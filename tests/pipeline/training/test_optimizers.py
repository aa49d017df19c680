"""Every optimizer of torch, schedulers and accumulation: after some steps the parameters of plain training."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam for loop": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, fused=False),
}


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8 + step % 3, 6), torch.randint(3, (8 + step % 3,))) for step in range(count)]


LOSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize(("name", "schedule"), zip(OPTIMIZERS, itertools.cycle(["1f1b", "zb-h1"])))
def test_parameters_are_those_of_plain_training(name, schedule):
    model = network()
    reference = plain.twin(model)
    theirs = OPTIMIZERS[name](reference.parameters())
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, micro_batches=4, schedule=schedule) as pipe:
        ours = OPTIMIZERS[name](pipe.parameters())
        for x, y in batches(4):
            pipe.zero_grad()
            pipe.step(x, target=y)
            ours.step()
            theirs.zero_grad()
            plain.micro_batched_step(reference, x, y, LOSS, 4)
            theirs.step()
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_muon_trains_the_matrices_and_another_the_rest():
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

    model = network()
    reference = plain.twin(model)
    theirs = make(reference)
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, micro_batches=4) as pipe:
        ours = make(model)
        for x, y in batches(5):
            pipe.zero_grad()
            reference.zero_grad()
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, LOSS, 4)
            for optimizer in (*ours, *theirs):
                optimizer.step()
    plain.assert_same(model.state_dict(), reference.state_dict())


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

        for _ in range(3):
            ours.step(closure)
            theirs.step(their_closure)
    plain.assert_close(model.state_dict(), reference.state_dict(), 1e-9)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_of_the_learning_rate(name):
    """The plateau is told the loss that a step returns; each group has a rate of its own."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        early = [p for n, p in model.named_parameters() if n.startswith(("0.", "1."))]
        late = [p for n, p in model.named_parameters() if not n.startswith(("0.", "1."))]
        return torch.optim.SGD([{"params": early, "lr": 0.01}, {"params": late}], lr=0.1, momentum=0.9)

    model = network()
    reference = plain.twin(model)
    theirs = make(reference)
    their_schedule = SCHEDULERS[name](theirs)
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, micro_batches=4) as pipe:
        ours = make(model)
        our_schedule = SCHEDULERS[name](ours)
        for x, y in batches(8):
            pipe.zero_grad()
            reference.zero_grad()
            losses = pipe.step(x, target=y), plain.micro_batched_step(reference, x, y, LOSS, 4)
            for optimizer, schedule, loss in zip(
                (ours, theirs), (our_schedule, their_schedule), losses, strict=True
            ):
                optimizer.step()
                schedule.step(float(loss)) if name == "plateau" else schedule.step()
            assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    plain.assert_same(model.state_dict(), reference.state_dict())
    assert ours.param_groups[0]["lr"] != 0.01


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_several_steps_make_one_update(set_to_none):
    model = network()
    reference = plain.twin(model)
    theirs = torch.optim.Adam(reference.parameters(), lr=0.01)
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, micro_batches=4, schedule="zb-h1") as pipe:
        ours = torch.optim.Adam(pipe.parameters(), lr=0.01)
        for step, (x, y) in enumerate(batches(9), 1):
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, LOSS, 4)
            if step % 3 == 0:
                norm = pipe.clip_grad_norm_(0.5)
                assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
                ours.step()
                theirs.step()
                pipe.zero_grad(set_to_none)
                theirs.zero_grad(set_to_none)
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_an_average_of_the_weights_follows():
    model = network()
    reference = plain.twin(model)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    averages = [torch.optim.swa_utils.AveragedModel(each) for each in (model, reference)]
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, micro_batches=4) as pipe:
        ours = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for x, y in batches(4):
            pipe.zero_grad()
            reference.zero_grad()
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, LOSS, 4)
            ours.step()
            theirs.step()
            for average, each in zip(averages, (model, reference), strict=True):
                average.update_parameters(each)
    plain.assert_same(averages[0].state_dict(), averages[1].state_dict())
