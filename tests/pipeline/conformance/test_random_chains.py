"""Random chains of layers train bit for bit as plain micro-batched training does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart.capture import flatten
from pipepart.planning.request import CHUNKS
from tests.support import plain
from tests.support.chains import Recompute, cut_by_hand
from tests.support.pieces import PIECES, RANDOM_PIECES, WIDTH
from tests.support.seeds import seeds

RECOMPUTE: tuple[Recompute, ...] = ("never", "never", "except-last", "always")
CLASSES = 3
LOSSES: list[tuple[Callable[..., Tensor], bool]] = [
    (nn.CrossEntropyLoss(), True),
    (nn.CrossEntropyLoss(), True),
    (nn.CrossEntropyLoss(reduction="sum"), False),
    (lambda output, target: nn.functional.cross_entropy(output, target), True),
]
DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16)
# What may come of gradients that one schedule adds up the other way round.


@dataclass
class Training:
    """A chain and how it is trained, all of it drawn from one seed."""

    model: nn.Sequential
    batches: list[tuple[Tensor, Tensor]]
    loss: tuple[Callable[..., Tensor], bool]
    parts: int
    borders: list[int]
    schedule: str
    chunks: int
    recompute: tuple[Recompute, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, seed: int) -> Training:
        choose = random.Random(seed)
        torch.manual_seed(seed)
        dtype = choose.choice(DTYPES)
        model = _chain(choose).to(dtype)
        wants_gradient = choose.random() < 0.4
        batches = []
        for samples in (choose.randint(2, 9), choose.randint(1, 9)):
            x = torch.randn(samples, WIDTH, dtype=dtype)
            batches.append((x.requires_grad_(wants_gradient), torch.randint(CLASSES, (samples,))))
        layers = len(flatten(model))
        borders = sorted(choose.sample(range(1, layers), min(choose.randint(0, 5), layers - 1)))
        schedule, chunks = choose.choice(_possible(len(borders) + 1))
        return cls(
            model=model,
            batches=batches,
            loss=choose.choice(LOSSES),
            parts=choose.randint(1, 6),
            borders=borders,
            schedule=schedule,
            chunks=chunks,
            recompute=tuple(choose.choices(RECOMPUTE, k=len(borders) + 1)),
            dtype=dtype,
        )


def _chain(choose: random.Random) -> nn.Sequential:
    pieces = PIECES + (RANDOM_PIECES if choose.random() < 0.5 else [])
    layers = [module for _ in range(choose.randint(1, 6)) for module in choose.choice(pieces)()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    if choose.random() < 0.3:
        _tie(model, choose)
    for module in model.modules():
        if choose.random() < 0.15:
            module.requires_grad_(False)
    return model.eval() if choose.random() < 0.1 else model


def _tie(model: nn.Sequential, choose: random.Random) -> None:
    """One weight for two layers, in one stage or in two."""
    alike = [layer for layer in model if type(layer) is nn.Linear and layer.out_features == WIDTH]
    if len(alike) > 1:
        one, other = choose.sample(alike, 2)
        other.weight = one.weight


def _possible(stages: int) -> list[tuple[str, int]]:
    """Every schedule that a pipeline runs with so many stages."""
    return [(name, chunks or 1) for name, chunks in CHUNKS.items() if stages % (chunks or 1) == 0]


def outcome(run: Callable[[], None]) -> str | None:
    """What kind of exception came, or None."""
    try:
        run()
    except Exception as error:
        return type(error).__name__
    return None


def check(seed: int) -> None:
    """Any chain, cut, schedule, batch, recomputation and frozen part: two steps, all gradients and buffers."""
    case = Training.of(seed)
    model, reference, (loss_fn, mean) = case.model, plain.twin(case.model), case.loss
    ours, theirs = (
        [(x.detach().clone().requires_grad_(x.requires_grad), y) for x, y in case.batches] for _ in range(2)
    )

    def train(pipe: Any) -> None:
        torch.manual_seed(seed)
        for x, y in ours:
            pipe.step(x, target=y)

    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in reference.modules())

    def train_plainly() -> None:
        torch.manual_seed(seed)
        for x, y in theirs:
            parts = min(case.parts, max(1, len(y) // 2) if norms else len(y))
            plain.micro_batched_step(reference, x, y, loss_fn, parts, mean, drawing=True)

    with cut_by_hand(
        model,
        case.borders,
        loss_fn=loss_fn,
        micro_batches=case.parts,
        schedule=case.schedule,
        chunks=case.chunks,
        recompute=case.recompute,
    ) as pipe:
        found = outcome(lambda: train(pipe))
    expected = outcome(train_plainly)
    trains = ours[0][0].requires_grad or any(parameter.requires_grad for parameter in model.parameters())
    if not trains:
        return
    if expected == "RuntimeError" and set(case.recompute) != {"never"}:
        return  # layers that write over what another has saved may do so where they get an input of their own
    assert (found is None) == (expected is None)  # of two layers that fail, another may come first
    if expected is None:
        _assert_alike([x.grad for x, _ in ours], [x.grad for x, _ in theirs])
        _assert_alike(plain.gradients(model), plain.gradients(reference))
        plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


def _assert_alike(ours: Any, theirs: Any) -> None:
    """Bit for bit."""
    if isinstance(ours, list):
        ours, theirs = dict(enumerate(ours)), dict(enumerate(theirs))
    plain.assert_same(ours, theirs)


@pytest.mark.parametrize("seed", range(12))
def test_a_chain_of_anything_trains_as_it_does_without_stages(seed):
    check(seed)


def test_the_chains_cover_every_schedule_dtype_and_mode():
    """Of any hundred, so that the sweep below leaves nothing out."""
    cases = [Training.of(seed) for seed in range(100, 200)]
    assert {case.schedule for case in cases} == set(CHUNKS)
    assert {case.dtype for case in cases} == set(DTYPES)
    assert {mode for case in cases for mode in case.recompute} == set(RECOMPUTE)
    assert any(case.parts > len(y) for case in cases for _, y in case.batches)
    assert sum(any(isinstance(part, nn.Dropout) for part in case.model.modules()) for case in cases) > 10


@pytest.mark.slow
@pytest.mark.parametrize("block", range(12))
def test_hundreds_of_chains_train_as_they_do_without_stages(block):
    for seed in seeds(100, f"chains {block}"):
        check(seed)
