"""Models in plain PyTorch, cut into stages, against the plain model on the same micro-batches."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.capture.families import quick
from tests.support.recorded import assert_same_step


class Recurrent(nn.Module):
    """Sequences of several lengths, packed for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([Packed(), Packed()])
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, lengths)
        last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, x.shape[-1])
        return self.head(x.gather(1, last).squeeze(1))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class Pyramid(nn.Module):
    """A list of pictures of several sizes in, a list out; each size is added to the next larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.ModuleList([nn.Conv2d(channels, 8, 1) for channels in (3, 4, 5)])
        self.leave = nn.ModuleList([nn.Conv2d(8, 2, 3, padding=1) for _ in range(3)])

    def forward(self, pictures: list[Tensor]) -> list[Tensor]:
        found = [layer(picture) for layer, picture in zip(self.enter, pictures, strict=True)]
        for index in (1, 0):
            found[index] = found[index] + F.interpolate(found[index + 1], scale_factor=2.0, mode="nearest")
        return [layer(one) for layer, one in zip(self.leave, found, strict=True)]


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _levels(output: list[Tensor], target: list[Tensor]) -> Tensor:
    return sum((F.mse_loss(one, other) for one, other in zip(output, target, strict=True)), torch.zeros(()))


IDS, LENGTHS = torch.arange(48).view(8, 6) * 7 % 20, torch.tensor([6, 4, 5, 2, 3, 6, 1, 4])
CASES: dict[type[nn.Module], tuple[Any, ...]] = {  # sample, target, loss
    Recurrent: ({"ids": IDS, "lengths": LENGTHS}, LENGTHS % 3, F.cross_entropy),
    Pyramid: (
        ([_noise(8, 3, 8, 8), _noise(8, 4, 4, 4), _noise(8, 5, 2, 2)],),
        [_noise(8, 2, size, size, seed=size) for size in (8, 4, 2)],
        _levels,
    ),
}
HOW = [(2, "1f1b", "never"), (3, "gpipe", "always"), (3, "zb-h1", "never")]


@pytest.mark.parametrize(
    ("kind", "how"), quick([(Recurrent, HOW[1]), (Pyramid, HOW[2])], itertools.product(CASES, HOW))
)
def test_gradients_are_those_of_plain_micro_batches(kind, how):
    sample, target, loss_fn = CASES[kind]
    stages, schedule, recompute = how
    settings: dict[str, Any] = {"stages": stages, "schedule": schedule, "recompute": recompute, "parts": 4}
    assert_same_step(kind(), sample, target=target, loss_fn=loss_fn, **settings)
