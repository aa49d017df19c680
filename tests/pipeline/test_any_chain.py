"""Chains thrown together at random train bit for bit as plain micro-batched training does."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart.capture import flatten
from tests import plain
from tests.chains import Recompute, cut_by_hand

WIDTH = 6
SCHEDULES = {
    1: ["1f1b", "gpipe", "sequential", "zb-h1"],
    2: ["interleaved-1f1b", "zb-v", "dualpipe-v", "hanayo"],
}
RECOMPUTE: tuple[Recompute, ...] = ("never", "never", "except-last", "always")


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x, "y": self.branch(x), "mask": x > 0}


class Middle(nn.Module):
    def forward(self, nest: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return nest["x"] * nest["mask"], nest["y"].tanh(), nest["y"]


class Join(nn.Module):
    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0] + parts[1] * parts[2]


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5)


class OtherLayout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, 3:], x[:, :3]], dim=1).t().contiguous().t()


class HalfDetached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.detach()


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool(x.detach().sum() > 0) else x.sin()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(1).expand(-1, 3, -1)
        return self.inner(tokens, tokens, tokens, need_weights=False)[0].mean(dim=1)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


PIECES: list[Callable[[], list[nn.Module]]] = [
    lambda: [linear()],
    lambda: [linear(), nn.ReLU(inplace=True)],
    lambda: [linear(), nn.LeakyReLU(inplace=True), InPlace()],
    lambda: [linear(), InPlace()],
    lambda: [nn.BatchNorm1d(WIDTH)],
    lambda: [nn.LayerNorm(WIDTH), nn.GELU()],
    lambda: [Fork(), Middle(), Join()],
    lambda: [OtherLayout()],
    lambda: [HalfDetached()],
    lambda: [Branches()],
    lambda: [nn.Identity()],
    lambda: [nn.Sequential(linear(), nn.Sequential(nn.Tanh()))],
    lambda: [nn.utils.parametrizations.weight_norm(linear())],
    lambda: [Attention()],
]


def outcome(run: Callable[[], None]) -> str | None:
    """What kind of exception came, or None."""
    try:
        run()
    except Exception as error:
        return type(error).__name__
    return None


def check(seed: int) -> None:
    """Any chain, cut, schedule, batch, recomputation and frozen part: two steps, all gradients and buffers."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    pieces = [module for _ in range(choose.randint(1, 6)) for module in choose.choice(PIECES)()]
    model = nn.Sequential(*pieces, nn.Linear(WIDTH, 3))
    for module in model.modules():
        if choose.random() < 0.15:
            module.requires_grad_(False)
    samples = choose.randint(2, 9)
    parts = choose.randint(1, samples // 2)
    x, y = torch.randn(samples, WIDTH), torch.randint(3, (samples,))
    layers = len(flatten(model))
    borders = sorted(choose.sample(range(1, layers), min(choose.randint(0, 4), layers - 1)))
    chunks = choose.choice([count for count in (1, 2) if (len(borders) + 1) % count == 0])
    schedule = choose.choice(SCHEDULES[chunks])
    recompute: tuple[Recompute, ...] = tuple(choose.choices(RECOMPUTE, k=len(borders) + 1))
    wants_gradient = choose.random() < 0.4
    reference = plain.twin(model)
    ours, theirs = (x.clone().requires_grad_(wants_gradient) for _ in range(2))

    def train(pipe: Any) -> None:
        for _ in range(2):
            pipe.step(ours, target=y)

    def train_plainly() -> None:
        for _ in range(2):
            plain.micro_batched_step(reference, theirs, y, nn.CrossEntropyLoss(), parts)

    with cut_by_hand(
        model,
        borders,
        loss_fn=nn.CrossEntropyLoss(),
        micro_batches=parts,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
    ) as pipe:
        found = outcome(lambda: train(pipe))
    expected = outcome(train_plainly)
    trains = wants_gradient or any(parameter.requires_grad for parameter in model.parameters())
    if not trains:
        return
    if expected == "RuntimeError" and set(recompute) != {"never"}:
        return  # layers that write over what another has saved may do so where they get an input of their own
    assert found == expected
    if expected is None:
        plain.assert_same({"x": ours.grad}, {"x": theirs.grad})
        plain.assert_same(plain.gradients(model), plain.gradients(reference))
        plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_of_anything_trains_as_it_does_without_stages(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(100, 2000, 100))
def test_hundreds_of_chains_train_as_they_do_without_stages(hundred):
    for seed in range(hundred, hundred + 100):
        check(seed)
