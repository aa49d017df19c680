"""Whole trainings of real models end at the parameters of plain training: Adam, clipping, dropout, a falling rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import digits, language
from tests.support import plain
from tests.support.chains import Recompute, cut_by_hand


def optimizer_of(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def train(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], step: Callable[..., Tensor], clip: Any
) -> list[float]:
    """The training loop of a script; returns the loss of each step."""
    torch.manual_seed(1)
    optimizer, slower = optimizer_of(model, len(batches))
    losses = []
    for x, y in batches:
        losses.append(step(x, y).item())
        clip()
        optimizer.step()
        optimizer.zero_grad()
        slower.step()
    return losses


def trained_both_ways(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[..., Tensor],
    borders: Sequence[int],
    parts: int,
    **options: Any,
) -> tuple[nn.Module, list[float]]:
    """Trains the model as a pipeline, and a twin of it plainly, which is returned with the pipeline's losses."""
    reference = plain.twin(model)
    with cut_by_hand(model, borders, loss_fn=loss_fn, micro_batches=parts, **options) as pipe:
        losses = train(model, batches, lambda x, y: pipe.step(x, target=y), lambda: pipe.clip_grad_norm_(1.0))
    train(
        reference,
        batches,
        lambda x, y: plain.micro_batched_step(reference, x, y, loss_fn, min(parts, len(y)), drawing=True),
        lambda: nn.utils.clip_grad_norm_(reference.parameters(), 1.0),
    )
    return reference, losses


def bytes_of_text(steps: int, samples: int = 8, length: int = 24) -> list[tuple[Tensor, Tensor]]:
    data = language.text()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - length, (steps, samples, 1), generator=generator)
    index = starts + torch.arange(length)
    return list(zip(data[index], data[index + 1], strict=True))


def small_language_model(*, tied: bool = False) -> nn.Sequential:
    """An embedding, two blocks with dropout, a norm and a head."""
    front, head = language.Front(), nn.Linear(language.WIDTH, 256, bias=False)
    if tied:
        head.weight = front.byte.weight
    blocks = (layer for _ in range(2) for layer in (language.Attention(), language.Perceptron()))
    return nn.Sequential(front, *blocks, nn.LayerNorm(language.WIDTH), head)


def epochs_of_digits(epochs: int, samples: int) -> list[tuple[Tensor, Tensor]]:
    """Batches in an order of their own each epoch, the last of them short."""
    x, y, _, _ = digits.digits()
    generator = torch.Generator().manual_seed(0)
    return [
        (x[batch], y[batch])
        for _ in range(epochs)
        for batch in torch.randperm(len(x), generator=generator).split(samples)
    ]


def small_digit_reader() -> nn.Sequential:
    """Convolutions with BatchNorm and ReLUs in place, dropout, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        digits.Residual(8),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 10),
    )


def test_a_few_steps_of_a_language_model() -> None:
    model = small_language_model(tied=True)
    reference, _ = trained_both_ways(
        model, bytes_of_text(4), language.next_byte_loss, [2, 4], 4, schedule="zb-h1"
    )
    plain.assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks", "recompute", "tied"),
    [("1f1b", 1, "always", False), ("zb-h1", 1, "except-last", True), ("zb-v", 2, "never", False)],
)
def test_a_language_model_after_200_steps_bit_for_bit(
    schedule: str, chunks: int, recompute: Recompute, tied: bool
) -> None:
    model = small_language_model(tied=tied)
    options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "recompute": recompute}
    reference, losses = trained_both_ways(
        model, bytes_of_text(200), language.next_byte_loss, [1, 3, 5], 4, **options
    )
    plain.assert_same(model.state_dict(), reference.state_dict())
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("looped-bfs", 2), ("interleaved-zb", 2)])
def test_digits_after_five_epochs_bit_for_bit(schedule: str, chunks: int) -> None:
    """Running statistics too; 115 steps, five of them with fewer samples."""
    model = small_digit_reader()
    batches = epochs_of_digits(5, 64)
    reference, losses = trained_both_ways(
        model, batches, nn.CrossEntropyLoss(), [2, 4, 7], 4, schedule=schedule, chunks=chunks
    )
    assert len(batches) == 115
    plain.assert_same(model.state_dict(), reference.state_dict())
    assert sum(losses[-20:]) < 0.4 * sum(losses[:20])
